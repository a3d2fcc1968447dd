"""The formulas, against numbers worked out by hand."""

import pytest

from specctl import theory


@pytest.mark.parametrize(
    ("alpha", "k", "expected"), [(0.7, 5, 2.94), (0.6, 4, 2.3056), (0.0, 5, 1.0), (1.0, 5, 6.0), (0.3, 0, 1.0)]
)
def test_expected_tokens(alpha: float, k: int, expected: float) -> None:
    assert theory.expected_tokens(alpha, k) == pytest.approx(expected, abs=5e-3)
    if alpha < 1:
        assert theory.expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


def test_expected_tokens_from_positions() -> None:
    assert theory.expected_tokens_from_positions([0.5, 0.4, 0.0, 0.9]) == pytest.approx(1 + 0.5 + 0.2)
    assert theory.expected_tokens_from_positions([]) == 1


def test_speedup() -> None:
    assert theory.speedup(3.0, 4, 0.1, 1.2, 0.4) == pytest.approx(3.0 / (0.4 + 1.2 + 0.4))
    assert theory.speedup(1.0, 0, 0.5, 1.7, 0.2) == 1


@pytest.mark.parametrize(("k", "c", "v", "o"), [(4, 0.1, 1.0, 0.0), (1, 0.3, 1.2, 0.1), (8, 0.05, 2.0, 0.2)])
def test_break_even_solves_for_a_speedup_of_one(k: int, c: float, v: float, o: float) -> None:
    alpha = theory.break_even_alpha(k, c, v, o)
    assert alpha is not None
    assert 0 < alpha < 1
    assert theory.speedup(theory.expected_tokens(alpha, k), k, c, v, o) == pytest.approx(1, abs=1e-9)


def test_break_even_at_the_ends() -> None:
    assert theory.break_even_alpha(1, 0.3, 1.0) == pytest.approx(0.3)  # K = 1: alpha > c
    assert theory.break_even_alpha(2, 1.0, 1.0) == pytest.approx(1)
    assert theory.break_even_alpha(2, 1.1, 1.0) is None
    assert theory.break_even_alpha(2, 0.0, 1.0) == pytest.approx(0, abs=1e-9)


def test_best_k_is_the_smallest_of_the_best() -> None:
    assert theory.best_k({0: 1.0, 2: 1.5, 1: 1.5, 3: 1.4}) == 1
    assert theory.best_k({0: 1.0, 1: 0.8, 2: 0.9}) == 0


@pytest.mark.parametrize(
    ("alpha", "c", "expected"),
    [(0.8, 0.1, "agreement"), (0.1, 0.1, "agreement"), (0.8, 0.9, "draft cost"), (1.0, 1.0, "draft cost")],
)
def test_cause_names_what_would_help(alpha: float, c: float, expected: str) -> None:
    assert theory.cause(alpha, 4, c, 1.0) == expected
