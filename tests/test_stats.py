"""Statistics are a fold over events; figures that do not exist are None."""

import pytest

from specctl.events import Finished, Round
from specctl.stats import Stats, collect


def round_(num_drafted: int, num_accepted: int, num_emitted: int | None = None, seconds: float = 0.5) -> Round:
    """A round; emitting fewer than accepted + 1 means that a stop cut the closing token."""
    length = num_accepted + 1 if num_emitted is None else num_emitted
    closing = None if length <= num_accepted else ("bonus" if num_accepted == num_drafted else "recovered")
    return Round(
        index=0,
        drafted=(5,) * num_drafted,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        emitted=tuple(range(length)),
        closing=closing,
        seconds=seconds,
        draft_seconds=0.1,
        verify_seconds=0.2,
        accept_seconds=0.05,
    )


EVENTS = [round_(3, 3), round_(3, 1), round_(3, 0), round_(1, 0), round_(2, 2, 2)]


def test_figures() -> None:
    token_ids, stats = collect([*EVENTS, Finished(reason="eos", prompt_seconds=0.25)])
    assert token_ids == [0, 1, 2, 3, 0, 1, 0, 0, 0, 1]
    assert (stats.num_new_tokens, stats.num_rounds, stats.num_drafted, stats.num_accepted) == (10, 5, 12, 6)
    assert stats.num_accepted + stats.num_closing == stats.num_new_tokens
    assert stats.acceptance_rate == pytest.approx(6 / 12)
    assert stats.mean_acceptance_length == pytest.approx(10 / 5)
    # Position 0 judged in all 5 rounds, position 1 where 0 was accepted, position 2 where 1 was.
    assert stats.conditional_acceptance == pytest.approx([3 / 5, 2 / 3, 1 / 1])
    assert stats.tokens_per_second == pytest.approx(10 / 2.5)  # the prompt's seconds stand beside
    assert stats.prompt_seconds == 0.25
    assert stats.end_to_end_tokens_per_second == pytest.approx(10 / 2.75)
    assert stats.reason == "eos"
    assert stats.figures()["acceptance_rate"] == stats.acceptance_rate


def test_nothing_drafted_and_nothing_done() -> None:
    _, plain = collect([round_(0, 0), round_(0, 0)])
    assert plain.acceptance_rate is None
    assert plain.conditional_acceptance == []
    assert plain.mean_acceptance_length == 1
    empty = Stats().figures()
    assert empty["mean_acceptance_length"] is empty["tokens_per_second"] is empty["acceptance_rate"] is None
    assert empty["end_to_end_tokens_per_second"] is None


def test_merging_equals_one_fold() -> None:
    for cut in range(len(EVENTS) + 1):
        _, merged = collect(EVENTS[:cut])
        merged.merge(collect(EVENTS[cut:])[1])
        assert merged.figures() == collect(EVENTS)[1].figures()
        assert merged.num_closing == collect(EVENTS)[1].num_closing


def test_collecting_into_given_statistics() -> None:
    _, stats = collect(EVENTS[:2])
    collect(EVENTS[2:], into=stats)
    assert stats.figures() == collect(EVENTS)[1].figures()
