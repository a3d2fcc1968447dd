"""At which K does speculation pay? Speed for each K, beside the speed that theory predicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specctl import theory
from specctl.errors import UsageError
from specctl.experiments.intervals import CategoryFigures, Interval, PromptFigures, best_k
from specctl.experiments.measure import Agreement, Progress, Variant, acceptance_on, measure_speeds, shared_figures
from specctl.experiments.pair import Pair
from specctl.experiments.timing import Costs, measure_costs
from specctl.experiments.trace import Trace
from specctl.experiments.workload import workload


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One K; K = 0 is plain decoding. Intervals are 95 %, over prompts; spread is `Speed.spread`, tokens/s.

    predicted_speedup: None where no prompts were left to predict from.
    """

    k: int
    tokens_per_second: float
    spread: float
    speedup: float | None
    predicted_speedup: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    speedup_interval: Interval | None = None
    mean_acceptance_length_interval: Interval | None = None
    by_category: list[CategoryFigures] = field(default_factory=list)
    by_prompt: list[PromptFigures] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """conditional_acceptance: at the largest K, from prompts other than the measured ones.

    note: what a reader must know about the columns, if anything. lossy: whether K > 0 gives another law.
    """

    drafter: str
    temperature: float
    rows: list[SweepRow]
    best_k: int
    cost_ratio: float | None
    verify_cost: dict[int, float]
    conditional_acceptance: list[float]
    reason: str
    note: str | None = None
    lossy: bool = False


def sweep_k(pair: Pair, drafter: str, progress: Progress | None = None, trace: Trace | None = None) -> Sweep:
    """Measure every K of `sweep.k`; predict each from acceptance on other prompts and costs timed apart.

    `trace` takes down the rounds of the prompts that are not timed.
    """
    if drafter == "none":
        raise UsageError("sweep-k needs a drafter; choose one with --drafter NAME")
    ks, work, seed = pair.ks(drafter), workload(pair), pair.config.seed
    if trace and not work.held_out:
        raise UsageError(f"--trace takes down prompts that are not timed. {work.note}")
    pair.warm_up([drafter], ks)
    agreement: Agreement | None = None
    costs = None
    if ks[-1] > 0:
        costs = measure_costs(pair, drafter, ks)
        if work.held_out:
            others = [prompt.token_ids for prompt in work.held_out]
            agreement = acceptance_on(pair, drafter, ks[-1], others, trace)
    speeds = measure_speeds(pair, [Variant(drafter, k) for k in ks], work.measured, progress)
    plain = speeds.get(Variant(drafter, 0))
    rows = [
        SweepRow(
            k=k,
            predicted_speedup=_predict(k, agreement, costs),
            **shared_figures(speeds[Variant(drafter, k)], plain, work.measured, seed),
        )
        for k in ks
    ]
    best = best_k({k: speeds[Variant(drafter, k)].timings for k in ks}, seed)
    return Sweep(
        drafter=drafter,
        temperature=pair.config.decoding.temperature,
        rows=rows,
        best_k=best,
        cost_ratio=costs.cost_ratio if costs else None,
        verify_cost=costs.verify_cost if costs else {1: 1.0},
        conditional_acceptance=agreement.stats.conditional_acceptance if agreement else [],
        reason=explain(next(row for row in rows if row.k == best), rows, costs),
        note=work.note if costs else None,
        lossy=pair.is_lossy(ks[-1]),
    )


def _predict(k: int, agreement: Agreement | None, costs: Costs | None) -> float | None:
    if k == 0 or costs is None:
        return 1.0
    if agreement is None:
        return None
    tokens = 1 + sum(agreement.marginal_acceptance[:k])
    prices = costs.cost_ratio, costs.verify_cost[k + 1], costs.overhead[k]
    return theory.speedup(tokens, k, *prices, drafted_share=agreement.drafted_share)


def _times(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}x"


def explain(best: SweepRow, rows: Sequence[SweepRow], costs: Costs | None) -> str:
    """One sentence that says why the best K is the best."""
    if costs is None:
        return "Only plain decoding was measured."
    fastest = max(rows, key=lambda row: row.tokens_per_second)
    if best.k == 0 and fastest.k > 0:
        return (
            f"Undecided: K = {fastest.k} was the fastest with {_times(fastest.speedup)}, but not beyond doubt; "
            "more prompts or repeats would tell (sweep.num_prompts, sweep.repeats)."
        )
    if best.k == 0:
        predicted = [row.predicted_speedup for row in rows if row.k > 0 and row.predicted_speedup is not None]
        allowed = f" (theory allows {max(predicted):.2f}x)" if predicted else ""
        return (
            f"Do not speculate with this pair: a draft step costs {costs.cost_ratio:.2f} target steps, and no K "
            f"was faster than plain decoding{allowed}."
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
