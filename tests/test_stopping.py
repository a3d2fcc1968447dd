"""Stops: the same text, reason and counts as plain decoding, however tokens fall into rounds."""

import json
from collections.abc import Iterator, Sequence

import pytest
import torch
from fakes import FakeModel, Points, const, enumerated_law, eoser, markov, max_error, self_draft
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import Tiny

from specctl.chance import Chance, SeededChance, enumerate_branches
from specctl.decoding import plain, speculative
from specctl.drafters.base import Drafter
from specctl.drafters.draft_model import DraftModel
from specctl.events import Event, Finished, Round
from specctl.sampling import SamplingLaw
from specctl.stats import collect
from specctl.stopping import Stopping, StopRules, VisibleText

GREEDY = SamplingLaw(temperature=0)


class Letters:
    """Token i is the i-th of "abc..."; token 25, "z", is half a character: two of them are "é"."""

    def __init__(self, before: Sequence[int] = ()) -> None:
        self._half = False

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for token_id in ids:
            if token_id == 25:
                text += "é" if self._half else ""
                self._half = not self._half
            else:
                text += ("?" if self._half else "") + chr(ord("a") + token_id)
                self._half = False
        return text

    def finish(self) -> str:
        return "?" if self._half else ""


def ids_of(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def visible(pieces: Sequence[str], stops: Sequence[str], min_new_tokens: int = 0) -> tuple[list[str], str, bool]:
    text = VisibleText(Letters(), stops, min_new_tokens)
    shown = [text.push(ids_of(piece)) for piece in pieces]
    return shown, text.finish(), text.stopped


def test_a_stop_string_is_found_across_tokens_and_pieces() -> None:
    assert visible(["ab", "cd", "ef"], ["cde"]) == (["ab", "", ""], "", True)
    assert visible(["abc", "dz"], ["cdz"]) == (["ab", ""], "cd?", False)
    assert visible(["z", "z", "b"], ["éb"]) == (["", "", ""], "", True)


def test_what_only_looks_like_a_stop_is_shown_late_and_whole() -> None:
    assert visible(["a", "a", "b"], ["aac"]) == (["", "", "aab"], "", False)
    assert visible(["a", "a"], ["aac"]) == (["", ""], "aa", False)
    assert visible(["a", "a", "a", "b"], ["aab"]) == (["", "", "a", ""], "", True)


def test_the_stop_that_begins_first_decides_where_two_end_together() -> None:
    assert visible(["abc"], ["bc", "abc"]) == ([""], "", True)


def test_a_stop_counts_only_beyond_the_shortest_output() -> None:
    assert visible(["a", "b", "a", "b"], ["ab"], 2) == (["", "ab", "", ""], "", True)
    assert visible(["a", "a", "a"], ["aa"], 2) == (["", "a", ""], "", True)  # the second pair, completed by the third


def kept(pieces: Sequence[str], **rules: object) -> tuple[str, str | None]:
    stopping = Stopping(StopRules(text=Letters, **rules), [0], 1000)  # type: ignore[arg-type]
    letters = ""
    for piece in pieces:
        if stopping.reason is None:
            letters += "".join(chr(ord("a") + token_id) for token_id in stopping.keep(ids_of(piece)))
    return letters, stopping.reason


def test_every_kind_of_end() -> None:
    assert kept(["klsuv"], max_new_tokens=5, stop_token_ids=frozenset({18})) == ("kls", "stop")
    assert kept(["kl", "suv"], max_new_tokens=5, eos_token_ids=frozenset({18, 20})) == ("kls", "eos")
    assert kept(["kl", "suv"], max_new_tokens=5, stop_strings=("ls",)) == ("kls", "stop")
    assert kept(["kl", "suv"], max_new_tokens=4, stop_strings=("v",)) == ("klsu", "length")
    assert kept(["kl", "suv"], max_new_tokens=5, stop_strings=("v",)) == ("klsuv", "stop")  # not "length": it was found
    ends = frozenset({10})
    assert kept(["kkk"], max_new_tokens=5, eos_token_ids=ends, min_new_tokens=1) == ("kk", "eos")


def scripted(script: str, name: str) -> FakeModel:
    """Says the letters of a script by position, over and over; where it may not, the first letter that it may."""
    ids = ids_of(script)
    rows = 9 * torch.nn.functional.one_hot(torch.tensor(ids), 26).double() - torch.arange(26)
    return FakeModel(lambda prefix: rows[len(prefix) % len(ids)], 26, name)


letters = st.text("abz", min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    target_script=letters,
    draft_script=letters,
    stops=st.lists(st.text("abé?", min_size=1, max_size=3), max_size=2),
    eos=st.sets(st.sampled_from([0, 1, 25]), max_size=1),
    stop_ids=st.sets(st.sampled_from([0, 1, 25]), max_size=1),
    budget=st.integers(0, 20),
    shortest=st.integers(0, 6),
    k=st.integers(1, 8),
)
def test_speculative_ends_as_plain_does(
    target_script: str,
    draft_script: str,
    stops: list[str],
    eos: set[int],
    stop_ids: set[int],
    budget: int,
    shortest: int,
    k: int,
) -> None:
    stop = StopRules(
        max_new_tokens=budget,
        min_new_tokens=shortest,
        eos_token_ids=frozenset(eos),
        stop_token_ids=frozenset(stop_ids),
        stop_strings=tuple(stops),
        text=Letters,
    )
    # Ends are ruled out by the law as well, as in a real run.
    law = SamplingLaw(temperature=0, min_new_tokens=shortest, end_token_ids=tuple(sorted(eos | stop_ids)))
    target, drafter = scripted(target_script, "target"), DraftModel(scripted(draft_script, "draft"), "draft")
    expected, plain_stats = collect(plain(target, [0], law=law, chance=SeededChance(0), stop=stop))
    events = list(
        speculative(target, drafter, [0], num_speculative_tokens=k, law=law, chance=SeededChance(0), stop=stop)
    )
    found, stats = collect(iter(events))
    assert (found, stats.reason, stats.num_new_tokens) == (expected, plain_stats.reason, len(expected))
    assert stats.num_accepted + stats.num_closing == stats.num_new_tokens
    # Text handed out round by round is the text handed out at once, and has no stop string beyond the shortest.
    by_round, at_once = (VisibleText(Letters(), stops, shortest) for _ in range(2))
    pieces = [by_round.push(event.emitted) for event in events if isinstance(event, Round)] + [by_round.finish()]
    whole = at_once.push(found) + at_once.finish()
    assert "".join(pieces) == whole
    if stats.reason in ("length", "context"):
        assert not by_round.stopped
    elif stats.reason == "stop":
        assert by_round.stopped or found[-1] in stop_ids
    if not shortest:
        assert not any(string in whole for string in stops)
        raw = Letters()
        assert (raw.push(found) + raw.finish()).startswith(whole)


def outcomes(run: object) -> dict[tuple[int, ...], float]:
    """The exact law of (tokens, reason); the reason is appended as a number."""
    reasons = ["eos", "stop", "length", "context"]
    law: dict[tuple[int, ...], float] = {}

    def result(chance: Chance) -> tuple[int, ...]:
        events: list[Event] = list(run(chance))  # type: ignore[operator]
        (finished,) = [event for event in events if isinstance(event, Finished)]
        tokens = [token_id for event in events if isinstance(event, Round) for token_id in event.emitted]
        return (*tokens, -1 - reasons.index(finished.reason))

    for probability, outcome in enumerate_branches(result):
        law[outcome] = law.get(outcome, 0.0) + probability
    return law


TARGET = ((0.2, 0.5, 0.3), (0.5, 0.2, 0.3), (0.25, 0.25, 0.5))
DRAFT = ((0.4, 0.3, 0.3), (0.2, 0.2, 0.6), (0.7, 0.2, 0.1))
DRAFTERS: dict[str, Drafter] = {
    "draft": DraftModel(markov(DRAFT, "draft"), "draft"),
    "self": self_draft(markov(TARGET)),
    "eoser": eoser(2, 3),
}


@pytest.mark.parametrize("shortest", [0, 2])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_law_of_text_and_reason_is_plains(name: str, k: int, shortest: int) -> None:
    """Sampled: tokens 0 and 1 are "a" and "b", 2 ends; "ba" stops; an end token is drafted and rejected, or taken."""
    target = markov(TARGET)
    law = SamplingLaw(min_new_tokens=shortest, end_token_ids=(2,))
    stop = StopRules(
        max_new_tokens=4, min_new_tokens=shortest, eos_token_ids=frozenset({2}), stop_strings=("ba",), text=Letters
    )
    expected = outcomes(lambda chance: plain(target, [0], law=law, chance=chance, stop=stop))

    def run(chance: Chance) -> Iterator[Event]:
        return speculative(target, DRAFTERS[name], [0], num_speculative_tokens=k, law=law, chance=chance, stop=stop)

    assert max_error(outcomes(run), expected) <= 1e-12
    assert all(len(tokens) > shortest for tokens in expected)
    assert {tokens[-1] for tokens in expected} == {-1, -2, -3}


def test_an_end_token_drafted_and_rejected_does_not_end() -> None:
    """EOSER proposes the end every time; a greedy target that never says it goes on to the budget."""
    stop = StopRules(max_new_tokens=9, eos_token_ids=frozenset({2}))
    events = speculative(
        const([0.6, 0.3, 0.1]),
        eoser(2, 3),
        [0],
        num_speculative_tokens=3,
        law=GREEDY,
        chance=SeededChance(0),
        stop=stop,
    )
    token_ids, stats = collect(events)
    assert token_ids == [0] * 9 and stats.reason == "length" and stats.num_accepted == 0 < stats.num_drafted


def test_a_forced_length_keeps_the_law_conditional() -> None:
    """The end has no probability early, the others keep their proportions, and drafting the end changes nothing."""
    law = SamplingLaw(min_new_tokens=2, end_token_ids=(2,))
    stop = StopRules(max_new_tokens=2)
    for drafter in (eoser(2, 3), Points(lambda ids: 1, 3), DraftModel(const([0.1, 0.1, 0.8], "draft"), "draft")):
        found = enumerated_law(
            lambda chance, drafter=drafter: speculative(
                const([0.5, 0.25, 0.25]),
                drafter,
                [0],
                num_speculative_tokens=2,
                law=law,
                chance=chance,
                stop=stop,
            )
        )
        expected = {(0, 0): 4 / 9, (0, 1): 2 / 9, (1, 0): 2 / 9, (1, 1): 1 / 9}
        assert max_error(found, expected) <= 1e-12


# Through the command line


@pytest.mark.parametrize("drafter", ["none", "aligned"])
def test_a_stop_string_ends_the_text_everywhere(tiny: Tiny, drafter: str) -> None:
    """The JSON, the stream and the file of a run agree: the text before the stop string, reason "stop"."""
    greedy = ("--temperature", "0", "--drafter", drafter)
    whole = tiny.specctl("generate", "--json", *greedy).json
    stop = whole["text"][len(whole["text"]) // 2 :][:3]
    end = whole["text"].index(stop)
    ending = ("--set", f"decoding.stop={json.dumps([stop])}")
    found = tiny.specctl("generate", "--json", *greedy, *ending).json
    assert (found["finish_reason"], found["text"]) == ("stop", whole["text"][:end])
    assert found["token_ids"] == whole["token_ids"][: len(found["token_ids"])]
    assert tiny.specctl("generate", *greedy, *ending).out == "def " + whole["text"][:end] + "\n"
    late = tiny.specctl("generate", "--json", *greedy, *ending, "--set", "decoding.min_new_tokens=12").json
    assert late["text"] == whole["text"] and late["finish_reason"] == "length"


def test_stop_tokens_and_filters_from_the_run_file(tiny: Tiny) -> None:
    whole = tiny.specctl("generate", "--json", "--temperature", "0").json["token_ids"]
    found = tiny.specctl("generate", "--json", "--temperature", "0", "--set", f"decoding.stop_token_ids=[{whole[2]}]")
    assert found.json["token_ids"] == whole[: whole.index(whole[2]) + 1] and found.json["finish_reason"] == "stop"
    # A nucleus of nothing but the likeliest token is greedy decoding.
    for narrow in ("top_p=1e-6", "min_p=1", "top_k=1"):
        assert tiny.specctl("generate", "--json", "--set", f"decoding.{narrow}").json["token_ids"] == whole


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("decoding.stop_token_ids=[300]", "300 is not in the vocabulary of 300 tokens"),
        ("decoding.min_new_tokens=13", "min_new_tokens (13) is above max_new_tokens (12)"),
        ('decoding.stop=[""]', "decoding.stop.0"),
        ("decoding.top_p=0", "decoding.top_p"),
        ("decoding.min_p=1.5", "decoding.min_p"),
    ],
)
def test_impossible_stops_are_refused(tiny: Tiny, override: str, says: str) -> None:
    answer = tiny.specctl("generate", "--set", override)
    assert answer.code == 2 and says in answer.err and "Traceback" not in answer.err


def test_a_short_draft_is_announced_once(tiny: Tiny) -> None:
    short = ("--set", "drafters.aligned.model.max_position_embeddings=16", "--set", "drafters.aligned.training.steps=2")
    folder = ("--set", f"run_dir={tiny.run_dir.parent / 'short'}", "--set", "target.training.steps=2")
    answer = tiny.specctl("generate", "--drafter", "aligned", "--json", *short, *folder)
    assert answer.code == 0 and answer.json["stats"]["num_drafted"] > 0
    notices = [line for line in answer.err.splitlines() if "the last 16 tokens" in line]
    assert len(notices) == 1


def test_a_stop_completed_too_early_does_not_count_later() -> None:
    """ "ab" is completed by the third token, which may not end the text; "xaby" would have held it back."""
    assert visible(["x", "a", "b", "w"], ["ab", "xaby"], 3) == (["", "", "", "xabw"], "", False)
