"""The public loop, enumerated: every branch of several rounds, in float64, against the exact law.

This is the test that the proof in specctl/acceptance.py points to. Each planted bug below is one that
real tools had; it shows that the enumeration would see it.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

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
from specctl.acceptance import Proposal, Verdict, block_rule, residual, token_rule, typical_rule
from specctl.chance import Chance, enumerate_branches
from specctl.decoding import plain, speculative
from specctl.drafters.base import Drafter
from specctl.drafters.draft_model import DraftModel
from specctl.drafters.medusa import MedusaDrafter
from specctl.events import Event, Round
from specctl.models.medusa import MedusaDecoder, MedusaHeads, MedusaShape
from specctl.sampling import History, SamplingLaw
from specctl.stopping import StopRules

Rule = Callable[[Tensor, Proposal, RuleChance], Verdict]
TOLERANCE = 1e-12
VISIBLE = 1e-3  # a planted bug is further from the law than this

PROBS = (0.5, 0.3, 0.2)
TARGET_ROWS = ((0.1, 0.6, 0.3), (0.5, 0.2, 0.3), (0.25, 0.25, 0.5))
DRAFT_ROWS = ((0.4, 0.3, 0.3), (0.2, 0.2, 0.6), (0.7, 0.2, 0.1))
TWO_ROWS = ((0.3, 0.7), (0.8, 0.2))
TWO_DRAFT_ROWS = ((0.6, 0.4), (0.25, 0.75))

exact_rules = pytest.mark.parametrize("rule", [token_rule, block_rule])


def speculate(
    target: Oracle,
    drafter: Drafter,
    *,
    k: int,
    num_tokens: int,
    law: SamplingLaw | None = None,
    rule: Rule = token_rule,
    draft_law: SamplingLaw | None = None,
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
            draft_law=draft_law,
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
@exact_rules
def test_speculative_has_the_law_of_the_target(rule: Rule, name: str, draft: str, k: int, num_tokens: int) -> None:
    target = TARGETS[name]()
    found = speculate(target, drafts_of(target)[draft], k=k, num_tokens=num_tokens, rule=rule)
    assert max_error(found, law_of(target, (0,), num_tokens)) <= TOLERANCE


@pytest.mark.parametrize("k", [1, 2, 3])
@exact_rules
def test_supports_that_do_not_meet(rule: Rule, k: int) -> None:
    target = markov(((0.5, 0.5, 0, 0), (0.9, 0.1, 0, 0), (0.5, 0.5, 0, 0), (0.5, 0.5, 0, 0)))
    probs = (0, 0, 0, 1) if k == 3 else (0, 0, 0.4, 0.6)
    num_tokens = 4 if k == 3 else 3
    found = speculate(target, DraftModel(const(probs, "draft"), "draft"), k=k, num_tokens=num_tokens, rule=rule)
    assert max_error(found, law_of(target, (0,), num_tokens)) <= TOLERANCE


@exact_rules
def test_three_drawn_tokens_and_several_rounds(rule: Rule) -> None:
    target = markov(TWO_ROWS)
    found = speculate(target, DraftModel(markov(TWO_DRAFT_ROWS, "draft"), "draft"), k=3, num_tokens=5, rule=rule)
    assert max_error(found, law_of(target, (0,), 5)) <= TOLERANCE


@pytest.mark.parametrize(("k", "num_tokens"), [(1, 4), (3, 4)])
@exact_rules
def test_a_history_draft_of_a_history_target(rule: Rule, k: int, num_tokens: int) -> None:
    """Both laws depend on the whole prefix, so a wrong cache or position on either side shows."""
    target, draft = (Tiny(random_llama(seed, vocab_size=2), name) for seed, name in ((0, "target"), (1, "draft")))
    found = speculate(target, DraftModel(draft, "draft"), k=k, num_tokens=num_tokens, prompt=(1, 1, 0), rule=rule)
    assert max_error(found, law_of(target, (1, 1, 0), num_tokens)) <= TOLERANCE


def test_temperature_and_top_k_bind_both_sides() -> None:
    law = SamplingLaw(temperature=0.7, top_k=2)
    target, draft = markov(TARGET_ROWS), DraftModel(markov(DRAFT_ROWS, "draft"), "draft")
    found = speculate(target, draft, k=2, num_tokens=3, law=law)
    assert max_error(found, law_of(target, (0,), 3, law)) <= TOLERANCE


@pytest.mark.parametrize("filters", [{"top_p": 0.6}, {"min_p": 0.5}, {"top_p": 0.9, "min_p": 0.2, "temperature": 1.5}])
@pytest.mark.parametrize("name", ["general", "point mass"])
@exact_rules
def test_filters_bind_both_sides(rule: Rule, name: str, filters: dict[str, float]) -> None:
    law = SamplingLaw(**filters)  # type: ignore[arg-type]
    target = markov(TARGET_ROWS)
    found = speculate(target, drafts_of(target)[name], k=2, num_tokens=3, law=law, rule=rule)
    assert max_error(found, law_of(target, (0,), 3, law)) <= TOLERANCE
    assert max_error(found, law_of(target, (0,), 3)) > VISIBLE  # the filters do filter


def medusa_heads(target: Tiny) -> MedusaDrafter:
    """Two heads with random weights, on the target's own hidden state."""
    shape = MedusaShape(num_heads=2, num_hidden_layers=1, hidden_size=8, vocab_size=3)
    heads, generator = MedusaHeads(shape).double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return MedusaDrafter(MedusaDecoder(heads, dtype=torch.float64, device=torch.device("cpu")), "medusa")


@exact_rules
def test_medusa_heads_of_a_history_target(rule: Rule) -> None:
    target = history(0)
    found = speculate(target, medusa_heads(target), k=2, num_tokens=3, prompt=(0, 1, 2), rule=rule)
    assert max_error(found, law_of(target, (0, 1, 2), 3)) <= TOLERANCE


PENALTIES = {
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": -0.9},
    "bias and bans": {"logit_bias": ((0, 1.5),), "banned_token_ids": (2,)},
    "all": {"repetition_penalty": 0.6, "presence_penalty": 0.5, "frequency_penalty": 0.7, "logit_bias": ((1, -0.5),)},
}


@pytest.mark.parametrize(
    ("name", "draft", "penalties"),
    [
        *itertools.product(["MARKOV"], ["general", "point mass"], PENALTIES),
        *itertools.product(["HISTORY"], ["general", "point mass", "medusa"], ["all"]),
    ],
)
def test_penalties_bind_every_row(name: str, draft: str, penalties: str) -> None:
    """The prompt holds 0 twice and 1 once, so that prompt and output are told apart."""
    law, prompt, target = SamplingLaw(**PENALTIES[penalties]), (0, 1, 0), TARGETS[name]()  # type: ignore[arg-type]
    drafter = medusa_heads(target) if isinstance(target, Tiny) and draft == "medusa" else drafts_of(target)[draft]
    found = speculate(target, drafter, k=2, num_tokens=3, law=law, prompt=prompt)
    assert max_error(found, law_of(target, prompt, 3, law)) <= TOLERANCE
    assert max_error(found, law_of(target, prompt, 3)) > VISIBLE  # the penalties do something


@exact_rules
def test_penalties_over_three_drafts_and_several_rounds(rule: Rule) -> None:
    """Rejected tokens leave no trace in later rounds."""
    law = SamplingLaw(frequency_penalty=0.7, repetition_penalty=1.4)
    target, draft = markov(TWO_ROWS), DraftModel(markov(TWO_DRAFT_ROWS, "draft"), "draft")
    found = speculate(target, draft, k=3, num_tokens=4, law=law, rule=rule)
    assert max_error(found, law_of(target, (0,), 4, law)) <= TOLERANCE


class BlindLaw(SamplingLaw):
    """A planted bug: the rows of a round count the committed tokens and none of the drafted."""

    def probs(self, logits: Tensor, history: History) -> Tensor:
        return SamplingLaw.probs(self, logits, replace(history, drafted=()) if logits.dim() == 2 else history)


@pytest.mark.parametrize("draft", ["general", "point mass"])
def test_penalties_that_do_not_see_the_drafted_prefix_are_seen(draft: str) -> None:
    target = markov(TARGET_ROWS)
    found = speculate(target, drafts_of(target)[draft], k=2, num_tokens=3, law=BlindLaw(presence_penalty=0.8))
    assert max_error(found, law_of(target, (0,), 3, SamplingLaw(presence_penalty=0.8))) > VISIBLE


@pytest.mark.parametrize("draft_temperature", [0.0, 0.4, 2.0])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@exact_rules
def test_a_draft_may_have_its_own_temperature(rule: Rule, temperature: float, draft_temperature: float) -> None:
    law, target = SamplingLaw(temperature=temperature), markov(TARGET_ROWS)
    draft_law = replace(law, temperature=draft_temperature)
    draft = drafts_of(target)["general"]
    found = speculate(target, draft, k=2, num_tokens=3, law=law, draft_law=draft_law, rule=rule)
    assert max_error(found, law_of(target, (0,), 3, law)) <= TOLERANCE


def test_judging_by_another_temperature_than_the_drafts_own_is_seen() -> None:
    """Planted: drawn at one temperature, declared at another."""

    class Misjudged(DraftModel):
        def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal:
            drawn = super().propose(history, limit, replace(law, temperature=0.4), chance)
            self._session.keep((len(history.token_ids) - 1,))
            declared = super().propose(history, limit, law, Repeating(drawn.ids))
            return declared

    class Repeating:
        def __init__(self, ids: Tensor) -> None:
            self._ids = iter(ids)

        def begin_round(self, index: int) -> None:
            pass

        def successes(self, probs: Tensor) -> Tensor:
            raise AssertionError

        def draw(self, weights: Tensor) -> Tensor:
            return next(self._ids).view(1)

    target, draft = markov(TARGET_ROWS), Misjudged(markov(DRAFT_ROWS, "draft"), "draft")
    assert max_error(speculate(target, draft, k=2, num_tokens=3), law_of(target, (0,), 3)) > VISIBLE


@pytest.mark.parametrize("context", [1, 3])
def test_a_draft_with_a_shorter_context_is_exact(context: int) -> None:
    """Its window slides within these tokens, and its law depends on all that it sees."""
    target = history(0)
    draft = history(1, "draft")
    short = FakeModel(draft.logits_after, 3, "draft", context)
    found = speculate(target, DraftModel(short, "draft"), k=2, num_tokens=3, prompt=(0, 1, 2))
    assert max_error(found, law_of(target, (0, 1, 2), 3)) <= TOLERANCE


@pytest.mark.parametrize("temperature", [0.0, 1e-4])
@exact_rules
def test_greedy_is_certain(rule: Rule, temperature: float) -> None:
    """Case A4."""
    law = SamplingLaw(temperature=temperature)
    draft = DraftModel(const((0.4, 0.3, 0.3), "draft"), "draft")
    assert speculate(const((0.3, 0.5, 0.2)), draft, k=2, num_tokens=4, law=law, rule=rule) == {(1, 1, 1, 1): 1.0}


# The block rule beside the token rule


def expected_accepted(target: Oracle, drafter: Drafter, rule: Rule, k: int, law: SamplingLaw | None = None) -> float:
    """Drafted tokens that the first round keeps, on average, by enumeration."""

    def run(chance: Chance) -> int:
        stop = StopRules(max_new_tokens=k + 1)
        options = {"law": law or SamplingLaw(), "chance": chance, "stop": stop, "rule": rule}
        round_ = next(speculative(target, drafter, (0,), num_speculative_tokens=k, **options))  # type: ignore[arg-type]
        assert isinstance(round_, Round) and round_.num_drafted == k
        return round_.num_accepted

    return sum(probability * accepted for probability, accepted in enumerate_branches(run))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("draft", ["general", "equal", "one-hot", "point mass"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_block_rule_never_keeps_fewer(name: str, draft: str, k: int) -> None:
    target = TARGETS[name]()
    drafter = drafts_of(target)[draft]
    token, block = (expected_accepted(target, drafter, rule, k) for rule in (token_rule, block_rule))
    if k == 1 or draft != "general":
        assert block == pytest.approx(token, abs=TOLERANCE)
    else:
        assert block > token + VISIBLE


def test_the_example_of_the_block_paper() -> None:
    """Sun et al., section 2: p = [1/3, 2/3] and q = [2/3, 1/3], K = 2: 10/9 and 11/9 tokens kept."""
    target, draft = const((1 / 3, 2 / 3)), DraftModel(const((2 / 3, 1 / 3), "draft"), "draft")
    assert expected_accepted(target, draft, token_rule, 2) == pytest.approx(10 / 9, abs=TOLERANCE)
    assert expected_accepted(target, draft, block_rule, 2) == pytest.approx(11 / 9, abs=TOLERANCE)


def _block(
    weight_in_residual: bool = True, weight_in_keep: bool = True, forwards: bool = False, closing: bool = True
) -> Rule:
    """The block rule written out a position at a time; each argument, turned, plants a bug."""

    def rule(p: Tensor, proposal: Proposal, chance: RuleChance) -> Verdict:
        ids, weights, keep = proposal.ids, [torch.ones((), dtype=p.dtype)], list[Tensor]()
        q = [proposal.row(torch.tensor(i)).to(p.dtype) for i in range(len(ids) + 1)]
        for i, x in enumerate(ids):
            weights.append((weights[-1] * p[i, x] / q[i][x]).clamp(max=1))
        for i in range(1, len(ids)):
            excess = (weights[i] * p[i] - q[i]).clamp(min=0).sum()
            rest = 1 - weights[i] if weight_in_keep else 0
            keep.append(excess / (excess + rest) if excess > 0 else excess)
        keep += weights[-1:] if len(ids) else []
        num_accepted = torch.tensor(0)
        if keep and forwards:
            num_accepted = chance.successes(torch.stack(keep))
        elif keep:
            num_accepted = len(ids) - chance.successes(1 - torch.stack(keep[::-1]))
        at = int(num_accepted)
        weight = weights[at] if weight_in_residual else 1
        law = residual(weight * p[at], q[at]) if closing else p[at]
        return Verdict(num_accepted, chance.draw(law), p.sum())

    return rule


@pytest.mark.parametrize(
    "bug",
    [
        {"weight_in_residual": False},
        {"weight_in_keep": False},
        {"forwards": True},
        {"closing": False},
    ],
    ids=lambda bug: next(iter(bug)),
)
def test_planted_bugs_of_the_block_rule_are_seen(bug: dict[str, bool]) -> None:
    """After id 2, of weight .8, two ids are left to close with, in other shares if the weight is forgotten."""
    target = markov(((0.3, 0.3, 0.4), (0.5, 0.2, 0.3), (0.45, 0.45, 0.1)))
    draft = DraftModel(markov(((0.2, 0.3, 0.5), (0.2, 0.2, 0.6), (0.1, 0.2, 0.7)), "draft"), "draft")
    expected = law_of(target, (0,), 3)
    assert max_error(speculate(target, draft, k=2, num_tokens=3, rule=_block()), expected) <= TOLERANCE
    assert max_error(speculate(target, draft, k=2, num_tokens=3, rule=_block(**bug)), expected) > VISIBLE


# The typical rule is what it is called: lossy


def test_the_typical_rule_has_another_law() -> None:
    """The example of docs/exactness.md: where every token is likely enough the output is the draft's."""
    rule = partial(typical_rule, epsilon=0.09, delta=0.3)
    target, draft = const((0.6, 0.3, 0.1)), DraftModel(const((0.2, 0.3, 0.5), "draft"), "draft")
    assert next_token(target, draft, rule=rule) == pytest.approx((0.2, 0.3, 0.5), abs=TOLERANCE)
    # Likely enough above .12: id 2 is not, and the token in its place is drawn from the target.
    picky = partial(typical_rule, epsilon=0.12, delta=0.3)
    assert next_token(target, draft, rule=picky) == pytest.approx((0.5, 0.45, 0.05), abs=TOLERANCE)


def test_the_typical_rule_is_greedy_at_zero() -> None:
    rule, law = partial(typical_rule, epsilon=0.09, delta=0.3), SamplingLaw(temperature=0)
    for draft in drafts_of(markov(TARGET_ROWS)).values():
        assert speculate(markov(TARGET_ROWS), draft, k=2, num_tokens=4, law=law, rule=rule) == {(1, 0, 1, 0): 1.0}


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


@exact_rules
def test_acceptance_of_the_cases(rule: Rule) -> None:
    """Cases A3 to A6 at K = 1, where the two rules are one."""
    three, draft = const((0.6, 0.3, 0.1)), DraftModel(const((0.2, 0.3, 0.5), "draft"), "draft")
    assert expected_accepted(three, draft, rule, 1) == pytest.approx(0.6, abs=TOLERANCE)
    greedy, wrong = SamplingLaw(temperature=0), DraftModel(const((0.4, 0.3, 0.3), "draft"), "draft")
    assert expected_accepted(const((0.3, 0.5, 0.2)), wrong, rule, 1, greedy) == 0
    points = Points(lambda token_ids: 1, 2)
    assert expected_accepted(const((0.6, 0.4)), points, rule, 1) == pytest.approx(0.4, abs=TOLERANCE)
    copied = self_draft(const(PROBS))
    assert expected_accepted(const(PROBS), copied, rule, 1) == pytest.approx(1, abs=TOLERANCE)
    assert expected_accepted(const(PROBS), copied, accept_if_equal, 1) == pytest.approx(0.38, abs=TOLERANCE)


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
