"""At which K does speculation pay? Speed for each K, beside the speed that theory predicts."""

from collections.abc import Sequence
from dataclasses import dataclass

from specctl import theory
from specctl.errors import UsageError
from specctl.experiments.measure import Progress, Variant, acceptance_on, measure_speeds
from specctl.experiments.pair import Pair
from specctl.experiments.timing import Costs, measure_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One K. spread is half the range over repeats, tokens/s; K = 0 is plain decoding."""

    k: int
    tokens_per_second: float
    spread: float
    speedup: float | None
    predicted_speedup: float
    acceptance_rate: float | None
    mean_acceptance_length: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """conditional_acceptance: at the largest K, from prompts other than the measured ones."""

    drafter: str
    temperature: float
    rows: list[SweepRow]
    best_k: int
    cost_ratio: float | None
    verify_cost: dict[int, float]
    conditional_acceptance: list[float]
    reason: str


def sweep_k(pair: Pair, drafter: str, progress: Progress | None = None) -> Sweep:
    """Measure every K of `sweep.k`; predict each from acceptance on other prompts and costs timed apart."""
    if drafter == "none":
        raise UsageError("sweep-k needs a drafter; choose one with --drafter NAME")
    ks = sorted(set(pair.config.sweep.k))
    other_prompts = pair.prompts(pair.config.sweep.num_prompts or 4, offset=pair.config.sweep.num_prompts or 4)
    acceptance: list[float] = []
    costs = None
    if ks[-1] > 0:
        acceptance = acceptance_on(pair, drafter, ks[-1], other_prompts).stats.conditional_acceptance
        costs = measure_costs(pair, drafter, ks)
    speeds = measure_speeds(pair, [Variant(drafter, k) for k in ks], progress)
    plain = speeds.get(Variant(drafter, 0))
    rows = []
    for k in ks:
        speed = speeds[Variant(drafter, k)]
        rows.append(
            SweepRow(
                k=k,
                tokens_per_second=speed.tokens_per_second,
                spread=speed.spread,
                speedup=speed.tokens_per_second / plain.tokens_per_second if plain else None,
                predicted_speedup=_predict(k, acceptance, costs),
                acceptance_rate=speed.stats.acceptance_rate,
                mean_acceptance_length=speed.stats.mean_acceptance_length,
            )
        )
    best = best_row(rows)
    return Sweep(
        drafter=drafter,
        temperature=pair.config.decoding.temperature,
        rows=rows,
        best_k=best.k,
        cost_ratio=costs.cost_ratio if costs else None,
        verify_cost=costs.verify_cost if costs else {1: 1.0},
        conditional_acceptance=acceptance,
        reason=explain(best, rows, costs),
    )


def _predict(k: int, acceptance: list[float], costs: Costs | None) -> float:
    if k == 0 or costs is None:
        return 1.0
    reached = (acceptance + acceptance[-1:] * k)[:k]  # positions never reached: as the last one that was
    tokens = theory.expected_tokens_from_positions(reached)
    return theory.speedup(tokens, k, costs.cost_ratio, costs.verify_cost[k + 1], costs.overhead[k])


def best_row(rows: Sequence[SweepRow]) -> SweepRow:
    """The smallest K whose speed lies within the fastest one's spread."""
    winner = max(rows, key=lambda row: row.tokens_per_second)
    near = [row for row in rows if row.tokens_per_second >= winner.tokens_per_second - winner.spread]
    return min(near, key=lambda row: row.k)


def explain(best: SweepRow, rows: Sequence[SweepRow], costs: Costs | None) -> str:
    """One sentence that says why the best K is the best."""
    if costs is None:
        return "Only plain decoding was measured."
    if best.k == 0:
        allowed = max(row.predicted_speedup for row in rows)
        return (
            f"Do not speculate with this pair: a draft step costs {costs.cost_ratio:.2f} target steps, and no K "
            f"was faster than plain decoding beyond its spread (theory allows {allowed:.2f}x)."
        )

    def price(k: int) -> float:
        return k * costs.cost_ratio + costs.verify_cost[k + 1] + costs.overhead[k]

    text = (
        f"K = {best.k} emits {best.mean_acceptance_length:.2f} tokens a target pass for the price of "
        f"{price(best.k):.2f} target steps ({best.k} draft steps of {costs.cost_ratio:.2f}, "
        f"verifying {costs.verify_cost[best.k + 1]:.2f}, the rest {costs.overhead[best.k]:.2f})"
    )
    longest = rows[-1]
    if longest.k > best.k:
        text += f"; K = {longest.k} emits {longest.mean_acceptance_length:.2f} for {price(longest.k):.2f}"
    return text + "."
