"""The formulas of speculative decoding, in plain Python; `docs/theory.md` derives them.

Symbols: `alpha` is the probability that one drafted token is accepted, `k` the number drafted,
`cost_ratio` c the seconds of a draft step over those of a target step, `verify_cost` v(n) the
seconds of a target pass over n rows over those of one row, `overhead` o the rest of a round over a
target step. Source: Leviathan et al. 2211.17192, equation 1 and theorem 3.8, with v and o added.
"""

from collections.abc import Mapping, Sequence
from typing import Literal


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens per target pass, E(K) = (1 - alpha^(K+1)) / (1 - alpha), K + 1 at alpha = 1."""
    return expected_tokens_from_positions([alpha] * k)


def expected_tokens_from_positions(conditional_acceptance: Sequence[float]) -> float:
    """Tokens per target pass, 1 + sum over i <= K of the product of a_1 .. a_i."""
    total, survival = 1.0, 1.0
    for acceptance in conditional_acceptance:
        survival *= acceptance
        total += survival
    return total


def speedup(tokens_per_pass: float, k: int, cost_ratio: float, verify_cost: float, overhead: float = 0.0) -> float:
    """Speed over plain decoding, S(K) = E(K) / (K c + v(K + 1) + o); 1 at K = 0 by definition."""
    return 1.0 if k == 0 else tokens_per_pass / (k * cost_ratio + verify_cost + overhead)


def break_even_alpha(k: int, cost_ratio: float, verify_cost: float, overhead: float = 0.0) -> float | None:
    """The alpha at which S(K) = 1, or None where not even alpha = 1 pays."""
    cost = k * cost_ratio + verify_cost + overhead
    if cost > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # E(K) grows with alpha: bisection
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < cost else (low, middle)
    return high


def best_k(predicted_speedup: Mapping[int, float]) -> int:
    """The K of the largest predicted speedup; the smallest such K on a tie."""
    return min(predicted_speedup, key=lambda k: (-predicted_speedup[k], k))


Cause = Literal["agreement", "draft cost"]


def cause(alpha: float, k: int, cost_ratio: float, verify_cost: float, overhead: float = 0.0) -> Cause:
    """What keeps the speedup down, from alpha, c, v and o alone: the one whose perfection would help more.

    Perfect agreement (alpha = 1) against a free draft (c = 0).
    """
    by_agreement = expected_tokens(1.0, k) / expected_tokens(alpha, k)
    by_free_draft = (k * cost_ratio + verify_cost + overhead) / (verify_cost + overhead)
    return "agreement" if by_agreement >= by_free_draft else "draft cost"
