"""The sampling law: temperature, top-k, one-hot at zero."""

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
