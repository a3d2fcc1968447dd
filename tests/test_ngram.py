"""Prompt lookup: which tokens it proposes, and that the law stays the target's."""

from collections.abc import Iterator

import pytest
import torch
from fakes import const, enumerated_law, history, law_of, max_error
from tiny_run import Tiny

from specctl.chance import Chance, SeededChance
from specctl.decoding import plain, speculative
from specctl.drafters.ngram import NgramDrafter
from specctl.events import Event
from specctl.sampling import History, SamplingLaw
from specctl.stats import collect
from specctl.stopping import StopRules


def ngram(minimum: int = 1, maximum: int = 3, vocab_size: int = 10) -> NgramDrafter:
    return NgramDrafter(minimum=minimum, maximum=maximum, vocab_size=vocab_size)


def proposed(drafter: NgramDrafter, token_ids: list[int], limit: int) -> list[int]:
    drafter.begin(token_ids, None)
    found = drafter.propose(History(token_ids=token_ids, prompt_length=1), limit, SamplingLaw(), SeededChance(0))
    return [int(token_id) for token_id in found.ids.tolist()]


@pytest.mark.parametrize(
    ("token_ids", "limit", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),  # what followed "1 2"
        ([1, 2, 3, 9, 2, 4, 1, 2], 2, [3, 9]),  # the longer match "1 2" beats the later match "2"
        ([2, 5, 2, 6, 2], 2, [6, 2]),  # of two matches of one length the latest
        ([1, 2, 3], 4, []),  # no match
        ([7], 4, []),  # a prompt shorter than any n-gram with a successor
        ([1, 1, 1], 4, [1]),  # a match at the very end has one token after it
        ([1, 2, 3, 4, 1, 2], 0, []),
    ],
)
def test_which_match_wins(token_ids: list[int], limit: int, expected: list[int]) -> None:
    assert proposed(ngram(), token_ids, limit) == expected


def test_a_minimum_asks_for_longer_matches() -> None:
    assert proposed(ngram(minimum=2), [2, 5, 3, 2], 2) == []
    assert proposed(ngram(minimum=1), [2, 5, 3, 2], 2) == [5, 3]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_law_is_the_targets(k: int) -> None:
    target, prompt = history(0), (0, 1, 0)

    def run(chance: Chance) -> Iterator[Event]:
        stop = StopRules(max_new_tokens=4)
        drafter = ngram(vocab_size=3)
        return speculative(
            target, drafter, prompt, num_speculative_tokens=k, law=SamplingLaw(), chance=chance, stop=stop
        )

    assert max_error(enumerated_law(run), law_of(target, prompt, 4)) <= 1e-12


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("prompt", [[1], [1, 1, 1], [0, 1, 2, 0, 1]])
def test_greedy_equals_plain_and_nothing_leaks(k: int, prompt: list[int]) -> None:
    target, law, stop = history(1), SamplingLaw(temperature=0), StopRules(max_new_tokens=20)
    expected, _ = collect(plain(target, prompt, law=law, chance=SeededChance(0), stop=stop))
    drafter = ngram(vocab_size=3)
    for other in ([2, 2, 2, 2], prompt):  # a request before must leave no trace
        found, stats = collect(
            speculative(target, drafter, other, num_speculative_tokens=k, law=law, chance=SeededChance(0), stop=stop)
        )
    assert found == expected
    assert stats.num_new_tokens == stats.num_accepted + stats.num_closing


def test_a_repeating_text_is_drafted_whole() -> None:
    target = const((0.0, 1.0, 0.0))
    drafter = ngram(vocab_size=3)
    events = speculative(
        target,
        drafter,
        [1, 1, 1, 1, 1, 1],
        num_speculative_tokens=4,
        law=SamplingLaw(),
        chance=SeededChance(0),
        stop=StopRules(max_new_tokens=40),
    )
    _, stats = collect(events)
    assert stats.acceptance_rate == 1.0
    assert stats.num_rounds < 40
    assert torch.tensor(stats.conditional_acceptance).eq(1).all()


def test_every_command_takes_it(tiny: Tiny) -> None:
    lookup = ("--set", "drafters.lookup.kind=ngram")
    swept = tiny.specctl("sweep-k", *lookup, "--drafter", "lookup", "--json")
    assert swept.code == 0 and [row["k"] for row in swept.json["rows"]] == [0, 1, 3]
    broken = tiny.specctl("break-it", *lookup, "--json")
    row = next(row for row in broken.json["rows"] if row["name"] == "lookup")
    assert row["cause"] and row["cost_ratio"] is not None and row["mean_acceptance_length"] >= 1
    generated = tiny.specctl("generate", *lookup, "--drafter", "lookup", "--json")
    assert generated.json["drafter"] == "lookup" and generated.json["stats"]["num_new_tokens"] == 12
    refused = tiny.specctl("train-draft", *lookup, "--drafter", "lookup")
    assert refused.code == 2 and "nothing to train" in refused.one_line


def test_fields_of_the_other_kind_are_refused(tiny: Tiny) -> None:
    wrong = tiny.specctl("generate", "--set", "drafters.aligned.kind=ngram")
    for field in ("corpus", "model", "training"):
        assert wrong.code == 2 and f"drafters.aligned.{field}: a drafter of kind ngram has no {field}" in wrong.err
    wrong = tiny.specctl("generate", "--set", "drafters.aligned.prompt_lookup_max=3")
    assert wrong.code == 2 and "a drafter of kind draft_model has no prompt_lookup_max" in wrong.err
