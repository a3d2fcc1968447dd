"""Prompt lookup: which tokens it proposes, and that the law stays the target's."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from fakes import FakeModel, const, enumerated_law, history, law_of, max_error
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import Tiny

from specctl.chance import Chance, SeededChance
from specctl.decoding import plain, speculative
from specctl.drafters.ngram import NgramDrafter
from specctl.drafters.suffixes import Suffixes
from specctl.events import Event, Round
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


def looked_up(token_ids: list[int], minimum: int, maximum: int) -> int | None:
    """Where to copy from, by comparing each suffix with every place, the longest suffix and the latest place first."""
    for length in range(min(maximum, len(token_ids) - 1), minimum - 1, -1):
        for after in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[after - length : after] == token_ids[-length:]:
                return after
    return None


def repeating(unit: list[int], count: int, slips: dict[int, int]) -> list[int]:
    text = (unit * count)[:60]
    return [slips.get(place, token_id) for place, token_id in enumerate(text)]


def texts() -> st.SearchStrategy[list[int]]:
    """Of few different tokens, and those that repeat a unit but for some slips."""
    token = st.integers(0, 2)
    units = st.lists(token, min_size=1, max_size=7)
    slips = st.dictionaries(st.integers(0, 59), token, max_size=4)
    repeated = st.builds(repeating, units, st.integers(1, 40), slips)
    return st.one_of(st.lists(token, min_size=1, max_size=60), repeated)


@settings(max_examples=400, deadline=None)
@given(texts(), st.lists(st.integers(1, 9), max_size=60), st.integers(1, 5), st.sampled_from([0, 1, 2, 4, 11, 500]))
def test_the_latest_place_of_the_longest_suffix_is_found(
    text: list[int], chunks: list[int], minimum: int, wider: int
) -> None:
    """However many tokens come at a time, and for suffixes of any lengths."""
    drafter = ngram(minimum, minimum + wider)
    length = min(len(text), chunks[0] if chunks else 1)
    drafter.begin(text[:length], None)
    for chunk in [0, *chunks[1:], len(text)]:
        length = min(len(text), length + chunk)
        seen = text[:length]
        after = looked_up(seen, minimum, minimum + wider)
        for limit in (0, 3):
            found = drafter.propose(History(token_ids=seen, prompt_length=1), limit, SamplingLaw(), SeededChance(0))
            assert found.ids.tolist() == ([] if after is None else seen[after : after + limit])


def hostile(kind: str, length: int) -> list[int]:
    if kind == "one token":
        return [1] * length
    if kind == "two tokens":
        return [1, 2] * (length // 2)
    if kind == "fibonacci":
        before, text = [1], [1, 2]
        while len(text) < length:
            before, text = text, text + before
        return text[:length]
    stairs = [token_id for step in range(length) for token_id in [2] + [1] * step][:length]
    return stairs if kind == "stairs" else stairs[: length // 2] * 2


def work_and_size(text: list[int], longest: int) -> tuple[int, int]:
    """Lines of our code run, and bytes held."""
    num_lines = 0

    def count(frame: object, event: str, argument: object) -> object:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    suffixes = Suffixes(longest)
    before = sys.gettrace()
    sys.settrace(count)
    try:
        suffixes.extend(text)
    finally:
        sys.settrace(before)
    held = (value for name in dir(suffixes) if isinstance(value := getattr(suffixes, name), list))
    size = sum(sys.getsizeof(values) + sum(map(sys.getsizeof, values)) for values in held)
    return num_lines, size


@pytest.mark.parametrize("kind", ["one token", "two tokens", "fibonacci", "stairs", "stairs twice"])
def test_work_and_memory_grow_with_the_text_alone(kind: str) -> None:
    """A table of all n-grams grows with the longest of them too: to 500 times as much."""
    short, long = (work_and_size(hostile(kind, 3000), longest) for longest in (4, 500))
    assert short[0] < 100 * 3000 and long[0] < 600 * 3000
    assert short[1] == pytest.approx(long[1], rel=0.1)
    assert long[1] < 1000 * 3000 and long[1] < 4 * work_and_size(hostile(kind, 1000), 500)[1]


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


def decoded(drafter: NgramDrafter, target: FakeModel, prompt: list[int], num_tokens: int = 6) -> list[Round]:
    """Greedily, without an end token."""
    rounds = speculative(
        target,
        drafter,
        prompt,
        num_speculative_tokens=4,
        law=SamplingLaw(temperature=0),
        chance=SeededChance(0),
        stop=StopRules(max_new_tokens=num_tokens),
    )
    return [replace(found, **NO_TIMES) for found in rounds if isinstance(found, Round)]


NO_TIMES = dict.fromkeys(("seconds", "draft_seconds", "verify_seconds", "accept_seconds"), 0.0)


def test_a_target_that_never_follows_the_prompt() -> None:
    """Case E19: 1, 1, 1 and then always 7. Drafts are rejected, no match is a plain step, later ones are accepted."""
    target = const([float(token_id == 7) for token_id in range(8)])
    rejected, silent, matched, last = decoded(ngram(vocab_size=8), target, [1, 1, 1])
    assert (rejected.drafted, rejected.num_accepted, rejected.emitted) == ((1,), 0, (7,))
    assert (silent.drafted, silent.num_drafted, silent.emitted, silent.closing) == ((), 0, (7,), "bonus")
    assert (matched.drafted, matched.num_accepted, matched.emitted) == ((7,), 1, (7, 7))
    assert last.emitted == (7, 7)
    (found,) = decoded(ngram(minimum=3, vocab_size=8), target, [1, 1], num_tokens=1)  # shorter than any that is asked
    assert (found.drafted, found.emitted) == ((), (7,))


def test_requests_in_turn_are_drafted_as_each_alone() -> None:
    """Case E20: A, B, A. What was drafted is compared, which a trace of another request would change."""
    target, first, second = history(1), [0, 1, 2, 0, 1], [2, 1, 2, 1, 0, 0, 2]
    drafter = ngram(vocab_size=3)
    for prompt in (first, second, first):
        assert decoded(drafter, target, prompt, 20) == decoded(ngram(vocab_size=3), target, prompt, 20)


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
