"""The profile of a round: which rounds it counts, and that its parts make up the whole."""

import pytest
from tiny_run import Tiny

from specctl.events import Round
from specctl.experiments.profile import profile


def round_(index: int, drafted: int, draft: float, verify: float, accept: float, rest: float) -> Round:
    return Round(
        index=index,
        drafted=tuple(range(drafted)),
        num_drafted=drafted,
        num_accepted=1,
        emitted=(5, 6),
        closing="recovered",
        seconds=draft + verify + accept + rest,
        draft_seconds=draft,
        verify_seconds=verify,
        accept_seconds=accept,
    )


def test_the_parts_are_medians_of_the_full_rounds_after_the_first(tiny: Tiny) -> None:
    rounds = [
        round_(0, 3, 9, 9, 9, 9),
        *(round_(i, 3, 1 + i, 10 * i, 0.5, 0.25) for i in (1, 2, 3)),
        round_(4, 1, 7, 7, 7, 7),
    ]
    found = profile(tiny.pair(), "distilled", 3, rounds)
    assert found is not None and found.num_rounds == 3 and found.tokens_per_round == 2
    seconds = {part.name: part.seconds for part in found.parts}
    assert seconds == {"draft, 3 tokens": 3, "verify": 20, "accept": 0.5, "bookkeeping": pytest.approx(0.25)}
    assert found.whole.seconds == pytest.approx(23.75)
    limits = {part.name: part.limit_seconds for part in found.parts}
    assert limits["draft, 3 tokens"] and limits["verify"] and limits["accept"] is None


def test_plain_decoding_has_one_part_and_nothing_full_has_none(tiny: Tiny) -> None:
    pair = tiny.pair()
    plain = [round_(i, 0, 0, 4, 0, 0) for i in range(3)]
    found = profile(pair, "none", 0, plain)
    assert found is not None and [part.name for part in found.parts] == ["target"]
    assert profile(pair, "distilled", 3, plain) is None


def test_the_command_shows_it_beside_the_text(tiny: Tiny) -> None:
    answer = tiny.specctl("generate", "--profile", "--no-train")
    assert answer.code == 0 and "Profile: a round of K = 3" in answer.err and "Profile" not in answer.out
    for part in ("draft, 3 tokens", "verify", "accept", "bookkeeping", "whole"):
        assert part in answer.err
