"""The sampling law: temperature, top-k, one-hot at zero, penalties, bias and bans."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.sampling import History, SamplingLaw

NO_HISTORY = History(token_ids=(), prompt_length=0)
LOGITS = torch.tensor([2.0, 1.0, 0.0, 1.0])


def probs(logits: torch.Tensor, **law: float) -> torch.Tensor:
    return SamplingLaw(**law).probs(logits, NO_HISTORY)  # type: ignore[arg-type]


def test_temperature_divides_the_logits() -> None:
    assert torch.equal(probs(LOGITS), torch.softmax(LOGITS, -1))
    assert torch.allclose(probs(LOGITS, temperature=0.5), torch.softmax(2 * LOGITS, -1))


def test_zero_is_the_lowest_of_the_largest() -> None:
    assert probs(torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 5.0]]), temperature=0).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-100])
def test_a_tiny_temperature_does_not_overflow(temperature: float) -> None:
    assert probs(torch.tensor([-900.0, 900.0, 899.0]), temperature=temperature).tolist() == [0, 1, 0]


def test_top_k_keeps_the_likeliest_and_ties() -> None:
    assert (probs(LOGITS, top_k=1) > 0).tolist() == [True, False, False, False]
    assert (probs(LOGITS, top_k=2) > 0).tolist() == [True, True, False, True]
    assert torch.equal(probs(LOGITS, top_k=4), probs(LOGITS))
    assert torch.equal(probs(LOGITS, top_k=99), probs(LOGITS, top_k=0))


def test_precision_is_float32_at_least() -> None:
    for given_dtype, expected in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32)):
        assert probs(LOGITS.to(given_dtype)).dtype == expected
    for temperature in (0.0, 0.5, 1.0):
        assert probs(LOGITS.double(), temperature=temperature).dtype == torch.float64


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_logit_spoils_its_whole_row_and_no_other(temperature: float, top_k: int, bad: float) -> None:
    """Whole, so that the rule notices whichever token it looks at."""
    for at in range(4):
        logits = LOGITS.repeat(2, 1)
        logits[0, at] = bad
        result = probs(logits, temperature=temperature, top_k=top_k)
        assert result[0].isnan().all()
        assert result[1].isfinite().all()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=8),
    st.floats(0, 3),
    st.integers(0, 9),
)
def test_always_a_distribution_that_leaves_its_input_alone(logits: list[float], temperature: float, top_k: int) -> None:
    tensor = torch.tensor(logits)
    before = tensor.clone()
    result = probs(tensor, temperature=temperature, top_k=top_k)
    assert torch.equal(tensor, before)
    assert result.min() >= 0
    assert abs(result.sum().item() - 1) < 1e-6


def test_top_p_keeps_the_fewest_that_reach_the_mass_and_ties() -> None:
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64).log()
    assert torch.allclose(probs(logits, top_p=0.4), torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))
    assert torch.allclose(probs(logits, top_p=0.6), torch.tensor([5 / 8, 3 / 8, 0, 0], dtype=torch.float64))
    assert torch.allclose(probs(logits, top_p=0.85), logits.exp())  # the third is needed, the fourth its equal
    assert torch.equal(probs(logits, top_p=1), torch.softmax(logits, -1))
    assert (probs(logits[[3, 1, 0, 2]], top_p=0.6) > 0).tolist() == [False, True, True, False]


def test_min_p_drops_what_is_unlikely_beside_the_likeliest() -> None:
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64).log()
    assert torch.allclose(probs(logits, min_p=0.5), torch.tensor([5 / 8, 3 / 8, 0, 0], dtype=torch.float64))
    assert torch.allclose(probs(logits, min_p=0.19), logits.exp())
    assert probs(logits, min_p=1).tolist() == [1, 0, 0, 0]


def test_the_documented_order() -> None:
    """Temperature before the masses, top-k before top-p, min-p last: each of these would differ otherwise."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    # At temperature 1/2 the probabilities are 16, 9, 4, 1 of 30: 0.53 needs one token, at temperature 1 it needs two.
    assert (probs(logits, temperature=0.5, top_p=0.53) > 0).sum() == 1
    # Of the two that top-k leaves the first has 4/7 > 0.55; of all four it has 0.4.
    assert (probs(logits, top_k=2, top_p=0.55) > 0).sum() == 1
    assert (probs(logits, top_p=0.55) > 0).sum() == 2
    assert (probs(logits, top_p=0.65, min_p=0.8) > 0).sum() == 1


def test_ends_are_ruled_out_row_by_row() -> None:
    """Three rows after a prompt of 2 and outputs of 1, 2 and 3 tokens; the end may come fourth at the earliest."""
    drafted = [torch.tensor([0]), torch.tensor([1])]
    seen = History(token_ids=(5, 6, 7), prompt_length=2, drafted=drafted)
    law = SamplingLaw(min_new_tokens=3, end_token_ids=(0, 3))
    result = law.probs(LOGITS.repeat(3, 1), seen)
    assert (result[:, [0, 3]] > 0).all(1).tolist() == [False, False, True]
    assert torch.equal(result[2], torch.softmax(LOGITS, -1))
    assert torch.allclose(result[0, [1, 2]], torch.softmax(LOGITS[[1, 2]], -1))
    one = law.probs(LOGITS, History(token_ids=(5, 6, 7), prompt_length=2, drafted=drafted[:1]))
    assert torch.equal(one, result[1])
    greedy = SamplingLaw(temperature=0, min_new_tokens=3, end_token_ids=(0,)).probs(LOGITS.repeat(3, 1), seen)
    assert greedy.argmax(-1).tolist() == [1, 1, 0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=8),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_filters_leave_a_distribution_over_the_likeliest(logits: list[float], top_p: float, min_p: float) -> None:
    tensor = torch.tensor(logits)
    result = probs(tensor, top_p=top_p, min_p=min_p)
    assert abs(result.sum().item() - 1) < 1e-6
    kept = result > 0
    assert kept[tensor.argmax()]
    softmax = torch.softmax(tensor, -1)
    if not kept.all() and softmax[kept].numel():
        assert softmax[~kept].max() <= softmax[kept].min()


@pytest.mark.parametrize("law", [{"top_p": 0.5}, {"min_p": 0.5}, {"top_p": 0.5, "min_p": 0.1, "top_k": 3}])
def test_filters_pass_a_bad_row_on(law: dict[str, float]) -> None:
    logits = LOGITS.repeat(2, 1)
    logits[0, 1] = float("nan")
    result = probs(logits, **law)
    assert result[0].isnan().all() and result[1].isfinite().all()


# Penalties, bias and bans. LOGITS with -1 in place of 0; the prompt is 2 0, the output 1 1.

SIGNED = torch.tensor([2.0, 1.0, -1.0, 1.0])
SEEN = History(token_ids=(2, 0, 1, 1), prompt_length=2)


def shaped(history: History, logits: torch.Tensor = SIGNED, **law: object) -> torch.Tensor:
    return SamplingLaw(**law).probs(logits, history)  # type: ignore[arg-type]


def softmax(*logits: float) -> torch.Tensor:
    return torch.softmax(torch.tensor(logits, dtype=torch.float32), -1)


def test_penalties_by_hand() -> None:
    assert torch.allclose(shaped(SEEN, repetition_penalty=2.0), softmax(1, 0.5, -2, 1))  # prompt and output, once each
    assert torch.allclose(shaped(SEEN, presence_penalty=0.5), softmax(2, 0.5, -1, 1))  # output only, once
    assert torch.allclose(shaped(SEEN, frequency_penalty=0.5), softmax(2, 0, -1, 1))  # output only, each time
    assert torch.allclose(shaped(SEEN, frequency_penalty=-0.5), softmax(2, 2, -1, 1))
    assert torch.allclose(shaped(SEEN, logit_bias=((3, 2.0), (0, -1.5))), softmax(0.5, 1, -1, 3))
    assert torch.allclose(shaped(SEEN, banned_token_ids=(0, 3)), softmax(-torch.inf, 1, -1, -torch.inf))
    both = shaped(SEEN, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    assert torch.allclose(both, softmax(1, 0.5 - 0.25 - 1, -2, 1))


def test_penalties_see_the_drafted_tokens_before_each_row() -> None:
    """Three rows, after the committed tokens and then after 3 and after 3 0."""
    drafted = [torch.tensor([3]), torch.tensor([0])]
    seen = History(token_ids=(2, 0, 1, 1), prompt_length=2, drafted=drafted)
    law: dict[str, object] = {"presence_penalty": 0.25, "frequency_penalty": 0.5}
    rows = shaped(seen, SIGNED.repeat(3, 1), **law)
    expected = torch.tensor([[2, -0.25, -1, 1], [2, -0.25, -1, 0.25], [1.25, -0.25, -1, 0.25]])
    assert torch.allclose(rows, expected.softmax(-1))
    repetition = shaped(seen, SIGNED.repeat(3, 1), repetition_penalty=2.0)
    assert torch.allclose(repetition[0], softmax(1, 0.5, -2, 1))
    assert torch.allclose(repetition[1], softmax(1, 0.5, -2, 0.5)) and torch.equal(repetition[1], repetition[2])
    # A single row comes after all; one after each prefix is the same law.
    for row in range(3):
        alone = History(token_ids=seen.token_ids, prompt_length=2, drafted=drafted[:row])
        assert torch.equal(shaped(alone, **law), rows[row])
        committed = History(token_ids=(2, 0, 1, 1, *(int(ids) for ids in drafted[:row])), prompt_length=2)
        assert torch.equal(shaped(committed, **law), rows[row])


def test_the_documented_order_of_penalties() -> None:
    """Bias before repetition, repetition before presence, all before the filters."""
    assert torch.allclose(shaped(SEEN, logit_bias=((0, -3.0),), repetition_penalty=2.0), softmax(-2, 0.5, -2, 1))
    assert torch.allclose(shaped(SEEN, repetition_penalty=2.0, presence_penalty=0.5), softmax(1, 0, -2, 1))
    cold = shaped(SEEN, presence_penalty=0.5, temperature=0.5)
    assert torch.allclose(cold, softmax(4, 1, -2, 2))
    assert (shaped(SEEN, banned_token_ids=(0,), top_k=1) > 0).tolist() == [False, True, False, True]
    assert shaped(SEEN, frequency_penalty=0.6, logit_bias=((0, -9.0),), temperature=0).tolist() == [0, 0, 0, 1]
    ends = shaped(SEEN, logit_bias=((0, 9.0),), min_new_tokens=3, end_token_ids=(0,), temperature=0)
    assert ends.tolist() == [0, 1, 0, 0]


def test_penalties_leave_their_input_and_its_precision() -> None:
    law: dict[str, object] = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "logit_bias": ((0, 1.0),)}
    for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        logits = SIGNED.to(dtype)
        assert shaped(SEEN, logits, **law, banned_token_ids=(3,)).dtype == expected
        assert torch.equal(logits, SIGNED.to(dtype))


def test_unset_penalties_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default law runs a softmax and no more."""

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
            ops.append(op.overloadpacket.__name__)
            return op(*arguments, **(options or {}))

    ops: list[str] = []
    with Counting():
        shaped(SEEN)
    assert ops == ["_softmax"]


@pytest.mark.parametrize("law", [{"repetition_penalty": 1.5}, {"presence_penalty": 1.0}, {"logit_bias": ((2, 1.0),)}])
def test_penalties_pass_a_bad_row_on(law: dict[str, object]) -> None:
    logits = LOGITS.repeat(2, 1)
    logits[0, 1] = float("nan")
    history = History(token_ids=(1, 2), prompt_length=1, drafted=[torch.tensor([0])])
    result = shaped(history, logits, **law)
    assert result[0].isnan().all() and result[1].isfinite().all()


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999, 1 - 2**-24])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 30.0])
def test_top_p_of_a_large_vocabulary_keeps_what_sorting_all_of_it_keeps(scale: float, top_p: float) -> None:
    logits = torch.randn(3, 152_064, generator=torch.Generator().manual_seed(0)) * scale
    full = torch.softmax(logits, -1)
    likeliest = full.sort(-1, descending=True).values
    needed = likeliest.cumsum(-1) - likeliest < top_p
    least = likeliest.gather(-1, needed.sum(-1, keepdim=True).clamp(min=1) - 1)
    kept = SamplingLaw(top_p=top_p).probs(logits, NO_HISTORY)
    assert torch.equal(kept > 0, (full >= least) & (full > 0))
    assert torch.allclose(kept.sum(-1), torch.ones(3))
