"""The public loop, enumerated: every branch of several rounds, in float64, against the exact law.

This is the test that the proof in specctl/acceptance.py points to. Each planted bug below is one that
real tools had; it shows that the enumeration would see it.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from fakes import (
    Cutting,
    FakeModel,
    Misdeclared,
    Oracle,
    Points,
    Tiny,
    const,
    enumerated_law,
    eoser,
    history,
    law_of,
    markov,
    max_error,
    random_llama,
    self_draft,
)
from torch import Tensor

from specctl.acceptance import Chance as RuleChance
from specctl.acceptance import Proposal, Verdict, residual, token_rule
from specctl.chance import Chance
from specctl.decoding import plain, speculative
from specctl.drafters.base import Drafter
from specctl.drafters.draft_model import DraftModel
from specctl.events import Event
from specctl.sampling import SamplingLaw
from specctl.stopping import StopRules

Rule = Callable[[Tensor, Proposal, RuleChance], Verdict]
TOLERANCE = 1e-12
VISIBLE = 1e-3  # a planted bug is further from the law than this

PROBS = (0.5, 0.3, 0.2)
TARGET_ROWS = ((0.1, 0.6, 0.3), (0.5, 0.2, 0.3), (0.25, 0.25, 0.5))
DRAFT_ROWS = ((0.4, 0.3, 0.3), (0.2, 0.2, 0.6), (0.7, 0.2, 0.1))
TWO_ROWS = ((0.3, 0.7), (0.8, 0.2))
TWO_DRAFT_ROWS = ((0.6, 0.4), (0.25, 0.75))


def speculate(
    target: Oracle,
    drafter: Drafter,
    *,
    k: int,
    num_tokens: int,
    law: SamplingLaw | None = None,
    rule: Rule = token_rule,
    prompt: tuple[int, ...] = (0,),
) -> dict[tuple[int, ...], float]:
    """The enumerated law of `speculative`."""

    def run(chance: Chance) -> Iterator[Event]:
        return speculative(
            target,
            drafter,
            prompt,
            num_speculative_tokens=k,
            law=law or SamplingLaw(),
            chance=chance,
            stop=StopRules(max_new_tokens=num_tokens),
            rule=rule,
        )

    return enumerated_law(run)


def next_token(
    target: Oracle, drafter: Drafter, law: SamplingLaw | None = None, rule: Rule = token_rule
) -> tuple[float, ...]:
    """The law of the first token where one was drafted, as a row."""
    found = speculate(target, drafter, k=1, num_tokens=2, law=law, rule=rule)
    return tuple(sum(p for tokens, p in found.items() if tokens[0] == i) for i in range(target.vocab_size))


def drafts_of(target: Oracle) -> dict[str, Drafter]:
    """General, equal, disjoint, one-hot: what a draft can be to a target with V = 3."""
    return {
        "general": DraftModel(markov(DRAFT_ROWS, "draft"), "draft"),
        "equal": self_draft(target),
        "one-hot": DraftModel(markov(((0, 1, 0), (0, 0, 1), (0, 1, 0)), "draft"), "draft"),
        "point mass": Points(lambda token_ids: (token_ids[-1] + 1) % 3, 3),
    }


TARGETS: dict[str, Callable[[], Oracle]] = {
    "CONST": lambda: const(PROBS),
    "MARKOV": lambda: markov(TARGET_ROWS),
    "HISTORY": lambda: history(0),
}


@pytest.mark.parametrize("name", TARGETS)
def test_plain_has_the_law_of_the_target(name: str) -> None:
    target = TARGETS[name]()
    stop = StopRules(max_new_tokens=4)
    found = enumerated_law(lambda chance: plain(target, (0, 2), law=SamplingLaw(), chance=chance, stop=stop))
    assert max_error(found, law_of(target, (0, 2), 4)) <= TOLERANCE


# Dense drafts at K = 3 stand further down, at V = 2; here point masses and one-hot rows keep K = 3 small.
@pytest.mark.parametrize(
    ("draft", "k", "num_tokens"),
    [
        ("general", 1, 3),
        ("general", 2, 3),
        ("equal", 2, 3),
        ("one-hot", 3, 4),
        ("point mass", 1, 3),
        ("point mass", 3, 4),
    ],
)
@pytest.mark.parametrize("name", TARGETS)
def test_speculative_has_the_law_of_the_target(name: str, draft: str, k: int, num_tokens: int) -> None:
    target = TARGETS[name]()
    found = speculate(target, drafts_of(target)[draft], k=k, num_tokens=num_tokens)
    assert max_error(found, law_of(target, (0,), num_tokens)) <= TOLERANCE


@pytest.mark.parametrize("k", [1, 2, 3])
def test_supports_that_do_not_meet(k: int) -> None:
    target = markov(((0.5, 0.5, 0, 0), (0.9, 0.1, 0, 0), (0.5, 0.5, 0, 0), (0.5, 0.5, 0, 0)))
    probs = (0, 0, 0, 1) if k == 3 else (0, 0, 0.4, 0.6)
    num_tokens = 4 if k == 3 else 3
    found = speculate(target, DraftModel(const(probs, "draft"), "draft"), k=k, num_tokens=num_tokens)
    assert max_error(found, law_of(target, (0,), num_tokens)) <= TOLERANCE


def test_three_drawn_tokens_and_several_rounds() -> None:
    target = markov(TWO_ROWS)
    found = speculate(target, DraftModel(markov(TWO_DRAFT_ROWS, "draft"), "draft"), k=3, num_tokens=4)
    assert max_error(found, law_of(target, (0,), 4)) <= TOLERANCE


@pytest.mark.parametrize(("k", "num_tokens"), [(1, 4), (3, 4)])
def test_a_history_draft_of_a_history_target(k: int, num_tokens: int) -> None:
    """Both laws depend on the whole prefix, so a wrong cache or position on either side shows."""
    target, draft = (Tiny(random_llama(seed, vocab_size=2), name) for seed, name in ((0, "target"), (1, "draft")))
    found = speculate(target, DraftModel(draft, "draft"), k=k, num_tokens=num_tokens, prompt=(1, 1, 0))
    assert max_error(found, law_of(target, (1, 1, 0), num_tokens)) <= TOLERANCE


def test_temperature_and_top_k_bind_both_sides() -> None:
    law = SamplingLaw(temperature=0.7, top_k=2)
    target, draft = markov(TARGET_ROWS), DraftModel(markov(DRAFT_ROWS, "draft"), "draft")
    found = speculate(target, draft, k=2, num_tokens=3, law=law)
    assert max_error(found, law_of(target, (0,), 3, law)) <= TOLERANCE


@pytest.mark.parametrize("filters", [{"top_p": 0.6}, {"min_p": 0.5}, {"top_p": 0.9, "min_p": 0.2, "temperature": 1.5}])
@pytest.mark.parametrize("name", ["general", "point mass"])
def test_filters_bind_both_sides(name: str, filters: dict[str, float]) -> None:
    law = SamplingLaw(**filters)  # type: ignore[arg-type]
    target = markov(TARGET_ROWS)
    found = speculate(target, drafts_of(target)[name], k=2, num_tokens=3, law=law)
    assert max_error(found, law_of(target, (0,), 3, law)) <= TOLERANCE
    assert max_error(found, law_of(target, (0,), 3)) > VISIBLE  # the filters do filter


@pytest.mark.parametrize("context", [1, 3])
def test_a_draft_with_a_shorter_context_is_exact(context: int) -> None:
    """Its window slides within these tokens, and its law depends on all that it sees."""
    target = history(0)
    draft = history(1, "draft")
    short = FakeModel(draft.logits_after, 3, "draft", context)
    found = speculate(target, DraftModel(short, "draft"), k=2, num_tokens=3, prompt=(0, 1, 2))
    assert max_error(found, law_of(target, (0, 1, 2), 3)) <= TOLERANCE


@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_greedy_is_certain(temperature: float) -> None:
    """Case A4."""
    law = SamplingLaw(temperature=temperature)
    draft = DraftModel(const((0.4, 0.3, 0.3), "draft"), "draft")
    assert speculate(const((0.3, 0.5, 0.2)), draft, k=2, num_tokens=4, law=law) == {(1, 1, 1, 1): 1.0}


# The numbers of the cases


def test_a_draft_that_proposes_its_favourite() -> None:
    """Case A1: a point mass is exact; the same token declared as drawn from the softmax is not."""
    target = const(PROBS)
    assert next_token(target, Points(lambda token_ids: 0, 3)) == pytest.approx(PROBS, abs=TOLERANCE)
    wrong = speculate(target, Misdeclared((0.4, 0.35, 0.25)), k=1, num_tokens=2)
    assert max_error(wrong, law_of(target, (0,), 2)) > VISIBLE
    assert next_token(target, Misdeclared((0.4, 0.35, 0.25))) == pytest.approx((1, 0, 0), abs=TOLERANCE)


def test_temperature_is_applied_to_both() -> None:
    """Case A2."""
    target = const(torch.tensor([2.0, 1.0, 0.0]).double().exp().tolist())
    draft = DraftModel(const(torch.tensor([0.0, 1.0, 2.0]).double().exp().tolist(), "draft"), "draft")
    assert next_token(target, draft, SamplingLaw(temperature=0.5)) == pytest.approx((0.8668, 0.1173, 0.0159), abs=5e-5)


def test_a_deterministic_proposal() -> None:
    """Case A5."""
    target, draft = const((0.6, 0.4)), Points(lambda token_ids: 1, 2)
    assert next_token(target, draft) == pytest.approx((0.6, 0.4), abs=TOLERANCE)
    assert next_token(target, draft, rule=redraw_from_target) == pytest.approx((0.36, 0.64), abs=TOLERANCE)


# Planted bugs


def _rule(closing_weights: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Rule:
    """The token rule, but with other weights (from p, q and the rejected id) for the token after a rejection."""

    def rule(p: Tensor, proposal: Proposal, chance: RuleChance) -> Verdict:
        acceptance = p[:-1].gather(1, proposal.ids[:, None])[:, 0] / proposal.at(proposal.ids)
        num_accepted = chance.successes(acceptance)
        row = p[int(num_accepted)]
        weights = row
        if num_accepted < len(proposal.ids):
            weights = closing_weights(row, proposal.row(num_accepted), proposal.ids[int(num_accepted)])
        return Verdict(num_accepted, chance.draw(weights), row.sum())

    return rule


def _zero_only_the_rejected(p: Tensor, q: Tensor, rejected: Tensor) -> Tensor:
    return p.scatter(0, rejected.view(1), 0.0)


def accept_everything(p: Tensor, proposal: Proposal, chance: RuleChance) -> Verdict:
    return Verdict(torch.tensor(len(proposal.ids)), chance.draw(p[-1]), p.sum())


def accept_if_equal(p: Tensor, proposal: Proposal, chance: RuleChance) -> Verdict:
    """Draw from the target and keep the draft where it is the same: exact, but accepts too little."""
    drawn = [chance.draw(row) for row in p]
    num_accepted = 0
    while num_accepted < len(proposal.ids) and drawn[num_accepted] == proposal.ids[num_accepted]:
        num_accepted += 1
    return Verdict(torch.tensor(num_accepted), drawn[num_accepted], p.sum())


correct = _rule(lambda p, q, rejected: residual(p, q))
redraw_from_target = _rule(lambda p, q, rejected: p)
zero_only_the_rejected = _rule(_zero_only_the_rejected)
residual_turned_round = _rule(lambda p, q, rejected: (q - p).clamp(min=0))


@pytest.mark.parametrize(
    ("rule", "first_token"),
    [
        (token_rule, (0.6, 0.3, 0.1)),
        (correct, (0.6, 0.3, 0.1)),
        (zero_only_the_rejected, (0.4667, 0.4333, 0.1)),
        (redraw_from_target, (0.44, 0.42, 0.14)),
        (residual_turned_round, (0.2, 0.3, 0.5)),
        (accept_everything, (0.2, 0.3, 0.5)),
    ],
)
def test_rules_of_case_a3(rule: Rule, first_token: tuple[float, ...]) -> None:
    """Case A3: the rule, and what the wrong ones would give; each wrong one is seen over two rounds."""
    target, draft = const((0.6, 0.3, 0.1)), DraftModel(const((0.2, 0.3, 0.5), "draft"), "draft")
    assert next_token(target, draft, rule=rule) == pytest.approx(first_token, abs=5e-5)
    error = max_error(speculate(target, draft, k=1, num_tokens=3, rule=rule), law_of(target, (0,), 3))
    if rule in (token_rule, correct):
        assert error <= TOLERANCE
    else:
        assert error > VISIBLE


def test_a_token_that_ends_the_draft_is_kept_or_the_law_breaks() -> None:
    """Case 13b."""
    target, draft = markov(TWO_ROWS), DraftModel(markov(TWO_DRAFT_ROWS, "draft"), "draft")
    expected = law_of(target, (0,), 3)
    for at in range(2):
        kept = speculate(target, Cutting(draft, at, withhold=False), k=2, num_tokens=3)
        assert max_error(kept, expected) <= TOLERANCE
        withheld = speculate(target, Cutting(draft, at, withhold=True), k=2, num_tokens=3)
        assert max_error(withheld, expected) > VISIBLE


def test_a_draft_of_end_tokens_is_exact() -> None:
    """EOSER: where the end token is emitted, the request ends; the law of what came is still the target's."""
    target = const((0.5, 0.3, 0.2))
    stop = StopRules(max_new_tokens=4, eos_token_ids=frozenset({2}))

    def run(chance: Chance) -> Iterator[Event]:
        return speculative(
            target,
            eoser(2, 3),
            (0,),
            num_speculative_tokens=2,
            law=SamplingLaw(),
            chance=chance,
            stop=stop,
        )

    expected = enumerated_law(lambda chance: plain(target, (0,), law=SamplingLaw(), chance=chance, stop=stop))
    assert max_error(enumerated_law(run), expected) <= TOLERANCE
    assert expected[(2,)] == pytest.approx(0.2)


def test_a_stale_cache_is_seen() -> None:
    """Planted: a target session that never rolls back the last rejected token breaks HISTORY's law."""
    target = history(0)

    class Stale:
        """Rolls back one token too few in content: what it should forget stays as the newest entry."""

        def __init__(self) -> None:
            self._session = target.session()
            self._ids: list[int] = []

        @property
        def lengths(self) -> tuple[int, ...]:
            return self._session.lengths

        def extend(self, ids: Tensor, num_logits: int | None = None):  # type: ignore[no-untyped-def]
            self._ids += ids[0].tolist()
            return self._session.extend(ids, num_logits)

        def keep(self, lengths: tuple[int, ...]) -> None:
            if lengths[0] < len(self._ids):
                stale = self._ids[lengths[0]]
                self._session.keep((lengths[0] - 1,))
                self._session.extend(torch.tensor([[stale]]))
            del self._ids[lengths[0] :]

    class StaleTarget:
        name, vocab_size, context_length = "target", 3, 16
        logits_after = staticmethod(target.logits_after)

        def session(self, batch_size: int = 1) -> Stale:
            return Stale()

    draft = Points(lambda token_ids: (token_ids[-1] + 1) % 3, 3)
    error = max_error(speculate(StaleTarget(), draft, k=2, num_tokens=3), law_of(target, (0,), 3))
    assert error > VISIBLE
