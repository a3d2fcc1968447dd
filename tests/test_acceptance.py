"""The rule at its edges: equal laws, zeros, extreme uniforms, NaN. Its law as a whole: test_exactness.py."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from fakes import FakeModel, const, emitted, self_draft
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specctl.acceptance import Chance, Proposal, Verdict, block_rule, residual, token_rule, typical_rule
from specctl.chance import SeededChance, enumerate_branches, inverse_cdf, leading_successes
from specctl.decoding import plain, speculative
from specctl.drafters.base import DenseProposal, PointProposal
from specctl.drafters.draft_model import DraftModel
from specctl.errors import NumericalError
from specctl.sampling import History, SamplingLaw
from specctl.stopping import StopRules
from specctl.theory import expected_tokens

NO_HISTORY = History(token_ids=(), prompt_length=0)
TYPICAL = partial(typical_rule, epsilon=0.09, delta=0.3)
Rule = Callable[[Tensor, Proposal, Chance], Verdict]

exact_rules = pytest.mark.parametrize("rule", [token_rule, block_rule])


class Scripted:
    """Answers `successes` with a fixed number and remembers the weights that it drew from."""

    def __init__(self, num_accepted: int, uniform: float = 0.5) -> None:
        self._num_accepted, self._uniform = num_accepted, uniform
        self.weights = torch.empty(0)

    def successes(self, probs: Tensor) -> Tensor:
        return torch.tensor(self._num_accepted)

    def draw(self, weights: Tensor) -> Tensor:
        self.weights = weights
        return inverse_cdf(weights, torch.tensor([self._uniform], dtype=torch.float64))


class Uniforms:
    """Every uniform is the same."""

    def __init__(self, value: float) -> None:
        self._value = value

    def successes(self, probs: Tensor) -> Tensor:
        return leading_successes(torch.full((len(probs),), self._value, dtype=torch.float64), probs)

    def draw(self, weights: Tensor) -> Tensor:
        return inverse_cdf(weights, torch.tensor([self._value], dtype=torch.float64))


class Always(Uniforms):
    """0.4 every time: every draw below takes token 2."""

    def __init__(self) -> None:
        super().__init__(0.4)

    def begin_round(self, index: int) -> None:
        pass


def dense(ids: list[int], rows: Tensor) -> DenseProposal:
    return DenseProposal(torch.tensor(ids), torch.cat([rows, torch.zeros_like(rows[:1])]))


def rejects(rule: Rule) -> int:
    """What `successes` answers where a single drafted token is rejected: the block rule asks for refusals."""
    return int(rule is block_rule)


def flat_probs(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.softmax(torch.randn(50, generator=generator, dtype=dtype), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@exact_rules
def test_a_rejection_forced_where_nothing_is_left_draws_from_the_target(rule: Rule, dtype: torch.dtype) -> None:
    """Case A7: q is p or one ulp above it everywhere, so the residual's sum is exactly 0."""
    p = flat_probs(dtype)
    for q in (p, torch.nextafter(p, torch.ones_like(p))):
        chance = Scripted(rejects(rule))
        verdict = rule(torch.stack([p, p]), dense([3], q[None]), chance)
        assert torch.equal(chance.weights, p)
        assert verdict.num_accepted == 0
        assert verdict.closing.item() == inverse_cdf(p, torch.tensor([0.5], dtype=torch.float64)).item() != 0


@exact_rules
def test_a_residual_of_one_ulp_is_used(rule: Rule) -> None:
    """Case A7: where anything is left, it and not p is drawn from."""
    p = flat_probs()
    q = p.clone()
    q[7] = torch.nextafter(p[7], torch.tensor(0.0))
    for uniform in (0.0, 0.5, 1.0):
        verdict = rule(torch.stack([p, p]), dense([3], q[None]), Scripted(rejects(rule), uniform))
        assert verdict.closing.item() == 7
        assert not verdict.health.isnan()


@exact_rules
def test_after_full_acceptance_the_bonus_comes_from_the_target(rule: Rule) -> None:
    p = torch.stack([flat_probs(), flat_probs().flip(0)])
    chance = Scripted(1 - rejects(rule))
    rule(p, dense([3], p[:1]), chance)
    assert torch.equal(chance.weights, p[1])


def test_the_block_rule_keeps_a_prefix_of_full_weight() -> None:
    """Where p and q agree to the last bit nothing is left to draw from after a prefix, and nothing ends there."""
    p = flat_probs().repeat(4, 1)
    asked: list[Tensor] = []

    class Asked(Uniforms):
        def successes(self, probs: Tensor) -> Tensor:
            asked.append(probs)
            return super().successes(probs)

    verdict = block_rule(p, dense([3, 4, 5], p[:3]), Asked(0.0))
    assert verdict.num_accepted == 3
    assert asked[0].tolist() == [0, 0, 0]  # from the whole draft down: never is one of them refused
    assert not verdict.health.isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_block_rule_with_ratios_that_overflow(dtype: torch.dtype) -> None:
    """p/q beyond the largest float32, and then an impossible token."""
    tiny = 1e-44 if dtype == torch.float32 else 1e-320
    p = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.5, 0.5]], dtype=dtype)
    q = torch.tensor([[tiny, 1.0], [1.0, tiny]], dtype=dtype)
    for uniform in (0.0, 0.5, 1 - 2**-53):
        verdict = block_rule(p, dense([0, 0], q), Uniforms(uniform))
        assert not verdict.health.isnan()
        assert (verdict.num_accepted.item(), verdict.closing.item()) == (1, 1)


@exact_rules
def test_nothing_drafted_is_a_plain_step(rule: Rule) -> None:
    p, chance = flat_probs()[None], Scripted(0)
    for proposal in (PointProposal(torch.empty(0, dtype=torch.int64), 50),):
        assert rule(p, proposal, chance).num_accepted == 0
        assert torch.equal(chance.weights, p[0])


def test_the_typical_rule_by_hand() -> None:
    """Entropies ln 4, 0 and ln 2: thresholds .075, .09 and .09; at the first refusal the target closes."""
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]])
    for ids, expected in (([3, 0, 1], 3), ([3, 0, 2], 2), ([3, 1, 1], 1)):
        chance = Scripted(0)
        verdict = TYPICAL(p, dense(ids, torch.full((3, 4), 0.25)), chance)
        assert verdict.num_accepted == expected
        assert torch.equal(chance.weights, p[expected])
        by_point = TYPICAL(p, PointProposal(torch.tensor(ids), 4), chance)
        assert by_point.num_accepted == expected  # q decides nothing
    assert TYPICAL(p[:1], PointProposal(torch.empty(0, dtype=torch.int64), 4), chance).num_accepted == 0
    refused = typical_rule(p, dense([0, 0, 0], torch.full((3, 4), 0.25)), chance, epsilon=0.25, delta=9.0)
    assert refused.num_accepted == 0  # the comparison is strict


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_bfloat16_logits_become_one_float32_law(temperature: float) -> None:
    """Case A7: V = 4096 and near-flat."""
    logits = (torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)) * 0.01).bfloat16()
    probs = SamplingLaw(temperature=temperature).probs(logits, NO_HISTORY)
    assert probs.dtype == torch.float32
    assert (probs.double().sum(-1) - 1).abs().max() < 1e-6
    assert (logits.softmax(-1).double().sum(-1) - 1).abs().max() > 1e-6  # what bfloat16 itself would have given


# 1.0 is no uniform, but a draw withstands it; the block rule's test of a refusal, u < 1, does not.
@pytest.mark.parametrize(
    ("rule", "uniform"),
    [
        *itertools.product((token_rule, TYPICAL), (0.0, 1.0 - 2**-53, 1.0)),
        *itertools.product((block_rule,), (0.0, 1.0 - 2**-53)),
    ],
)
def test_extreme_uniforms_never_emit_an_impossible_token(rule: Rule, uniform: float) -> None:
    """Case A8, in the test, in the residual and in the bonus: token 0 and the last have p = 0."""
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).repeat(2, 1)
    for drafted in range(4):
        for proposal in (dense([drafted], torch.full((1, 4), 0.25)), PointProposal(torch.tensor([drafted]), 4)):
            verdict = rule(p, proposal, Uniforms(uniform))
            assert verdict.closing.item() in (1, 2)
            assert drafted in (1, 2) or verdict.num_accepted == 0


def test_the_comparison_is_strict() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    assert leading_successes(zero, torch.tensor([0.0])) == 0
    assert leading_successes(zero, torch.tensor([1e-30])) == 1
    assert leading_successes(torch.tensor([0.1, 0.9, 0.1]), torch.tensor([0.5, 0.5, 0.5])) == 1


def test_a_large_vocabulary_in_float32() -> None:
    """Case A8: V = 150,000; whatever the uniform, the id drawn has weight."""
    weights = torch.rand(150_000, generator=torch.Generator().manual_seed(0))
    weights[::3] = 0
    weights[-3000:] = 0
    weights /= weights.sum()
    cumulative = weights.double().cumsum(0)
    edges = (cumulative[::5000] / cumulative[-1]).tolist()
    fine = [i * 2**-30 for i in range(30)]
    ids = set()
    for uniform in [0.0, 1.0, 1 - 2**-53, 1 - 2**-24, *edges, *fine]:
        token = inverse_cdf(weights, torch.tensor([uniform], dtype=torch.float64)).item()
        assert weights[int(token)] > 0
        ids.add(token)
    assert len(ids) > 30
    # A token too light for a float32 sum near 1, or for a float32 uniform there, still has its interval.
    weights[148_001] = 1e-9
    cumulative = weights.double().cumsum(0)
    middle = (cumulative[148_000:148_002].mean() / cumulative[-1]).view(1)
    assert inverse_cdf(weights, middle).item() == 148_001


def broken_after(num_tokens: int, at: int, value: float, name: str) -> FakeModel:
    """Certain of token 2, but with one bad logit once the prefix has `num_tokens` tokens."""

    def logits_after(prefix: list[int]) -> Tensor:
        logits = torch.tensor([0.0, 1.0, 9.0])
        if len(prefix) >= num_tokens:
            logits[at] = value
        return logits

    return FakeModel(logits_after, 3, name)


def healthy(name: str) -> FakeModel:
    return broken_after(10**6, 0, 0.0, name)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("culprit", ["the target", "the draft"])
@exact_rules
def test_a_bad_logit_stops_at_once(rule: Rule, culprit: str, value: float, at: int, temperature: float) -> None:
    """Case A8: the message names the model and the round (here the second, after a prompt of 1 and 3 tokens)."""
    models = {name: healthy(name) for name in ("the target", "the draft")}
    models[culprit] = broken_after(4, at, value, culprit)
    events = speculative(
        models["the target"],
        DraftModel(models["the draft"], "the draft"),
        (1,),
        num_speculative_tokens=2,
        law=SamplingLaw(temperature=temperature),
        chance=Always(),
        stop=StopRules(max_new_tokens=20),
        rule=rule,
    )
    with pytest.raises(NumericalError, match=rf"^{culprit} produced NaN or infinite logits at round 1;"):
        emitted(events)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_logit_stops_plain_decoding(temperature: float) -> None:
    model = broken_after(3, 0, float("nan"), "the target")
    law, stop = SamplingLaw(temperature=temperature), StopRules(max_new_tokens=20)
    with pytest.raises(NumericalError, match=r"^the target produced .* at round 2;"):
        emitted(plain(model, (1,), law=law, chance=Always(), stop=stop))


def expected_counts(k: int) -> tuple[float, float, list[float]]:
    """Exact E[accepted], E[tokens] and conditional acceptance of one round of case A3's models."""
    p = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).repeat(k + 1, 1)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    at_least = [0.0] * (k + 1)

    def run(chance) -> int:  # type: ignore[no-untyped-def]
        ids = [int(chance.draw(q)) for _ in range(k)]
        return int(token_rule(p, dense(ids, q.repeat(k, 1)), chance).num_accepted)

    for probability, num_accepted in enumerate_branches(run):
        for i in range(num_accepted + 1):
            at_least[i] += probability
    assert at_least[0] == pytest.approx(1, abs=1e-12)
    accepted = sum(at_least[1:])
    return accepted, accepted + 1, [b / a for a, b in itertools.pairwise(at_least)]


@pytest.mark.parametrize(("k", "rate", "length"), [(1, 0.6, 1.6), (2, 0.48, 1.96)])
def test_figures_of_case_a9(k: int, rate: float, length: float) -> None:
    accepted, tokens, conditional = expected_counts(k)
    assert accepted / k == pytest.approx(rate, abs=1e-12)
    assert tokens == pytest.approx(length, abs=1e-12) == pytest.approx(expected_tokens(0.6, k))
    assert conditional == pytest.approx([0.6] * k, abs=1e-12)


@pytest.mark.parametrize(("k", "rate", "length"), [(4, 0.3264, 2.3056), (8, 0.1844, 2.4748)])
def test_figures_of_case_a9_by_formula(k: int, rate: float, length: float) -> None:
    assert expected_tokens(0.6, k) == pytest.approx(length, abs=5e-5)
    assert (expected_tokens(0.6, k) - 1) / k == pytest.approx(rate, abs=5e-5)


@exact_rules
def test_a_copy_of_the_target_is_always_accepted(rule: Rule) -> None:
    """Case A6."""
    target = const((0.5, 0.3, 0.2))
    law, stop = SamplingLaw(), StopRules(max_new_tokens=60)
    options = {"law": law, "chance": SeededChance(0), "stop": stop, "rule": rule}
    events = speculative(target, self_draft(target), (0,), num_speculative_tokens=3, **options)  # type: ignore[arg-type]
    assert all(event.num_accepted == event.num_drafted for event in events if hasattr(event, "emitted"))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_point_mass_is_a_one_hot_row(data: st.DataObject) -> None:
    """PointProposal and DenseProposal of the same one-hot rows: equal answers, equal verdicts under every rule."""
    vocab_size = data.draw(st.integers(1, 6))
    tokens = st.integers(0, vocab_size - 1)
    drafted = data.draw(st.lists(tokens, max_size=4))
    asked = torch.tensor(data.draw(st.lists(tokens, min_size=len(drafted), max_size=len(drafted))), dtype=torch.int64)
    ids = torch.tensor(drafted, dtype=torch.int64)
    one_hot = torch.cat([torch.eye(vocab_size)[ids], torch.zeros(1, vocab_size)])
    point, full = PointProposal(ids, vocab_size), DenseProposal(ids, one_hot)
    assert torch.equal(point.at(asked), full.at(asked))
    for position in range(len(drafted) + 1):
        assert torch.equal(point.row(torch.tensor(position)), full.row(torch.tensor(position)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    p = torch.softmax(torch.randn(len(drafted) + 1, vocab_size, generator=generator), -1)
    chance = Uniforms(data.draw(st.sampled_from([0.0, 0.2, 0.6, 0.999])))
    weighted = p[:-1] * torch.linspace(0.2, 1, len(drafted))[:, None]
    assert torch.allclose(point.excess(weighted), full.excess(weighted), atol=1e-7)
    for rule in (token_rule, block_rule, TYPICAL):
        by_point, by_row = rule(p, point, chance), rule(p, full, chance)
        assert torch.equal(by_point.num_accepted, by_row.num_accepted)
        assert torch.equal(by_point.closing, by_row.closing)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_the_residual_completes_the_law(p_weights: list[float], q_weights: list[float]) -> None:
    """The proof at one position: min(p, q) + (1 - sum min(p, q)) * residual = p."""
    p, q = (torch.tensor(w, dtype=torch.float64) + 0.01 for w in (p_weights, q_weights))
    p, q = p / p.sum(), q / q.sum()
    kept = torch.minimum(p, q)
    rest = residual(p, q)
    assert torch.allclose(kept + (1 - kept.sum()) * rest / rest.sum(), p, atol=1e-12)
