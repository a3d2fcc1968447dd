"""The rule at its edges: equal laws, zeros, extreme uniforms, NaN. Its law as a whole: test_exactness.py."""

import itertools

import pytest
import torch
from fakes import FakeModel, const, emitted, self_draft
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specctl.acceptance import residual, token_rule
from specctl.chance import SeededChance, enumerate_branches, inverse_cdf, leading_successes
from specctl.decoding import plain, speculative
from specctl.drafters.base import DenseProposal, PointProposal
from specctl.drafters.draft_model import DraftModel
from specctl.errors import NumericalError
from specctl.sampling import History, SamplingLaw
from specctl.stopping import StopRules
from specctl.theory import expected_tokens

NO_HISTORY = History(token_ids=(), prompt_length=0)


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


def flat_probs(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.softmax(torch.randn(50, generator=generator, dtype=dtype), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rejection_forced_where_nothing_is_left_draws_from_the_target(dtype: torch.dtype) -> None:
    """Case A7: q is p or one ulp above it everywhere, so the residual's sum is exactly 0."""
    p = flat_probs(dtype)
    for q in (p, torch.nextafter(p, torch.ones_like(p))):
        chance = Scripted(0)
        verdict = token_rule(torch.stack([p, p]), dense([3], q[None]), chance)
        assert torch.equal(chance.weights, p)
        assert verdict.num_accepted == 0
        assert verdict.closing.item() == inverse_cdf(p, torch.tensor([0.5], dtype=torch.float64)).item() != 0


def test_a_residual_of_one_ulp_is_used() -> None:
    """Case A7: where anything is left, it and not p is drawn from."""
    p = flat_probs()
    q = p.clone()
    q[7] = torch.nextafter(p[7], torch.tensor(0.0))
    for uniform in (0.0, 0.5, 1.0):
        verdict = token_rule(torch.stack([p, p]), dense([3], q[None]), Scripted(0, uniform))
        assert verdict.closing.item() == 7
        assert not verdict.health.isnan()


def test_after_full_acceptance_the_bonus_comes_from_the_target() -> None:
    p = torch.stack([flat_probs(), flat_probs().flip(0)])
    chance = Scripted(1)
    token_rule(p, dense([3], p[:1]), chance)
    assert torch.equal(chance.weights, p[1])


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_bfloat16_logits_become_one_float32_law(temperature: float) -> None:
    """Case A7: V = 4096 and near-flat."""
    logits = (torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)) * 0.01).bfloat16()
    probs = SamplingLaw(temperature=temperature).probs(logits, NO_HISTORY)
    assert probs.dtype == torch.float32
    assert (probs.double().sum(-1) - 1).abs().max() < 1e-6
    assert (logits.softmax(-1).double().sum(-1) - 1).abs().max() > 1e-6  # what bfloat16 itself would have given


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53, 1.0])
def test_extreme_uniforms_never_emit_an_impossible_token(uniform: float) -> None:
    """Case A8, in the test, in the residual and in the bonus: token 0 and the last have p = 0."""
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).repeat(2, 1)
    for drafted in range(4):
        for proposal in (dense([drafted], torch.full((1, 4), 0.25)), PointProposal(torch.tensor([drafted]), 4)):
            verdict = token_rule(p, proposal, Uniforms(uniform))
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
def test_a_bad_logit_stops_at_once(culprit: str, value: float, at: int, temperature: float) -> None:
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


def test_a_copy_of_the_target_is_always_accepted() -> None:
    """Case A6."""
    target = const((0.5, 0.3, 0.2))
    law, stop = SamplingLaw(), StopRules(max_new_tokens=60)
    events = speculative(
        target, self_draft(target), (0,), num_speculative_tokens=3, law=law, chance=SeededChance(0), stop=stop
    )
    assert all(event.num_accepted == event.num_drafted for event in events if hasattr(event, "emitted"))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_point_mass_is_a_one_hot_row(data: st.DataObject) -> None:
    """PointProposal and DenseProposal of the same one-hot rows: equal answers, equal verdicts."""
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
    by_point, by_row = token_rule(p, point, chance), token_rule(p, full, chance)
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
