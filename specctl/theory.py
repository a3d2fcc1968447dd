"""The formulas of speculative decoding, in plain Python; `docs/theory.md` derives them.

Symbols: `alpha` is the probability that one drafted token is accepted, `k` the number drafted,
`cost_ratio` c the seconds of a draft step over those of a target step, `verify_cost` v(n) the
seconds of a target pass over n rows over those of one row, `overhead` o the rest of a round over a
target step. Source: Leviathan et al. 2211.17192, equation 1 and theorem 3.8, with v and o added.
"""

from collections.abc import Mapping, Sequence


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


def speedup(
    tokens_per_pass: float,
    k: int,
    cost_ratio: float,
    verify_cost: float,
    overhead: float = 0.0,
    drafted_share: float = 1.0,
) -> float:
    """Speed over plain decoding, S(K) = E(K) / (K c + v(K + 1) + o); 1 at K = 0 by definition.

    drafted_share: of the rounds; the others, where the drafter proposed nothing, cost a plain step.
    """
    if k == 0:
        return 1.0
    return tokens_per_pass / (drafted_share * (k * cost_ratio + verify_cost + overhead) + 1 - drafted_share)


def break_even_alpha(k: int, cost_ratio: float, verify_cost: float, overhead: float = 0.0) -> float | None:
    """The alpha at which S(K) = 1, or None where not even alpha = 1 pays."""
    price = k * cost_ratio + verify_cost + overhead
    if price > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # E(K) grows with alpha: bisection
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < price else (low, middle)
    return high


def best_k(predicted_speedup: Mapping[int, float]) -> int:
    """The K of the largest predicted speedup; the smallest such K on a tie."""
    return min(predicted_speedup, key=lambda k: (-predicted_speedup[k], k))


def cause(alpha: float, k: int, cost_ratio: float, verify_cost: float, overhead: float = 0.0) -> str:
    """Why speculation pays or does not, in a phrase, from alpha, c, v and o alone.

    Where it does not pay, the blame goes to what would help more: perfect agreement or a free draft.
    """
    tokens = expected_tokens(alpha, k)
    predicted = speedup(tokens, k, cost_ratio, verify_cost, overhead)
    threshold = break_even_alpha(k, cost_ratio, verify_cost, overhead)
    needed = "no alpha would pay" if threshold is None else f"break-even is {threshold:.2f}"
    if predicted > 1:
        return f"pays, by theory {predicted:.2f}x: alpha {alpha:.2f}, {needed}"
    by_agreement = expected_tokens(1.0, k) / tokens
    by_free_draft = (k * cost_ratio + verify_cost + overhead) / (verify_cost + overhead)
    if by_agreement >= by_free_draft:
        return f"low agreement: alpha {alpha:.2f}, {needed}"
    return f"costly draft: a draft step costs {cost_ratio:.2f} target steps, {needed} (alpha {alpha:.2f})"
