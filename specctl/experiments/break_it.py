"""What makes speculation fail: the same K with drafts that agree with the target less and less."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from specctl import theory
from specctl.errors import UsageError
from specctl.experiments.intervals import CategoryFigures, Interval, PromptFigures
from specctl.experiments.measure import Progress, Variant, acceptance_on, measure_speeds, shared_figures
from specctl.experiments.pair import Pair
from specctl.experiments.timing import measure_costs
from specctl.experiments.trace import Trace
from specctl.experiments.watch import Judged
from specctl.experiments.workload import workload


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBand:
    """The drafts judged where the entropy of the target's law, nats, lay in [low, high); None has no end.

    acceptance: the share of them that was accepted, None where there were none.
    """

    low: float
    high: float | None
    num_judged: int
    acceptance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakRow:
    """One drafter at the run's K; the baseline is plain decoding and has no draft figures.

    From prompts other than the timed ones: expected_acceptance, which is alpha, the mean of
    sum_x min(p, q); conditional_acceptance by position; acceptance_by_entropy in bands that are the
    same for all drafters and hold a third each of all that was judged.
    """

    name: str
    tokens_per_second: float
    spread: float
    speedup: float
    acceptance_rate: float | None = None
    expected_acceptance: float | None = None
    conditional_acceptance: list[float] | None = None
    acceptance_by_entropy: list[EntropyBand] | None = None
    mean_acceptance_length: float | None = None
    cost_ratio: float | None = None
    break_even_alpha: float | None = None
    cause: str | None = None
    speedup_interval: Interval | None = None
    mean_acceptance_length_interval: Interval | None = None
    by_category: list[CategoryFigures] = field(default_factory=list)
    by_prompt: list[PromptFigures] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakIt:
    k: int
    temperature: float
    rows: list[BreakRow]
    note: str | None = None
    lossy: bool = False


def break_it(pair: Pair, names: Sequence[str], progress: Progress | None = None, trace: Trace | None = None) -> BreakIt:
    """Compare plain decoding with the named drafters at the same K.

    `trace` takes down the rounds of the prompts that are not timed.
    """
    k = pair.config.decoding.num_speculative_tokens
    if k == 0 or not names:
        raise UsageError("break-it needs drafters in the config and decoding.num_speculative_tokens of 1 or more")
    work, seed = workload(pair), pair.config.seed
    if trace and not work.held_out:
        raise UsageError(f"--trace takes down prompts that are not timed. {work.note}")
    others = [prompt.token_ids for prompt in work.held_out]
    agreements = {name: acceptance_on(pair, name, k, others, trace) for name in names}
    limits = entropy_limits([position for agreement in agreements.values() for position in agreement.judged])
    costs = {name: measure_costs(pair, name, [k]) for name in names}
    baseline = Variant("none", 0)
    speeds = measure_speeds(pair, [baseline, *(Variant(name, k) for name in names)], work.measured, progress)
    plain = speeds[baseline]
    rows = [BreakRow(name="baseline", **shared_figures(plain, plain, work.measured, seed))]
    for name in names:
        cost, agreement = costs[name], agreements[name]
        alpha = agreement.expected_acceptance if others else None
        prices = (cost.cost_ratio, cost.verify_cost[k + 1], cost.overhead[k])
        figures = shared_figures(speeds[Variant(name, k)], plain, work.measured, seed)
        rows.append(
            BreakRow(
                name=name,
                expected_acceptance=alpha,
                conditional_acceptance=agreement.stats.conditional_acceptance,
                acceptance_by_entropy=by_entropy(agreement.judged, limits),
                cost_ratio=cost.cost_ratio,
                break_even_alpha=theory.break_even_alpha(k, *prices),
                cause=_cause(alpha, figures["speedup"], k, *prices) if others else None,
                **figures,
            )
        )
    return BreakIt(k=k, temperature=pair.config.decoding.temperature, rows=rows, note=work.note, lossy=pair.is_lossy(k))


def _cause(alpha: float | None, measured: float, k: int, *prices: float) -> str:
    """Theory's word, and where the measurement contradicts it, that too."""
    if alpha is None:
        return "drafted nothing, so its rounds were plain steps"
    cause = theory.cause(alpha, k, *prices)
    if measured < 1 < theory.speedup(theory.expected_tokens(alpha, k), k, *prices):
        cause += f"; measured {measured:.2f}x, less than theory allows"
    return cause


def entropy_limits(judged: Sequence[Judged]) -> list[float]:
    """Entropies that cut what was judged into three equal parts; fewer where many are equal, as in greedy decoding."""
    entropies = sorted(position.entropy for position in judged)
    cuts = {entropies[len(entropies) * third // 3] for third in (1, 2)} if entropies else set()
    return sorted(cuts - set(entropies[:1]))


def by_entropy(judged: Sequence[Judged], limits: Sequence[float]) -> list[EntropyBand]:
    """Acceptance in each band between the limits."""
    bands: list[list[bool]] = [[] for _ in range(len(limits) + 1)]
    for position in judged:
        bands[bisect_right(limits, position.entropy)].append(position.accepted)
    return [
        EntropyBand(low=low, high=high, num_judged=len(band), acceptance=sum(band) / len(band) if band else None)
        for low, high, band in zip([0.0, *limits], [*limits, None], bands, strict=True)
    ]


def explain_acceptance(row: BreakRow) -> str | None:
    """One sentence on where a drafter's tokens were accepted; None for the baseline or where nothing was judged."""
    if not row.conditional_acceptance or not row.acceptance_by_entropy:
        return None
    text = "accepted by position " + ", ".join(f"{share:.0%}" for share in row.conditional_acceptance)
    surest, least_sure = row.acceptance_by_entropy[0], row.acceptance_by_entropy[-1]
    if surest.acceptance is not None and least_sure.acceptance is not None and surest is not least_sure:
        text += (
            f"; {surest.acceptance:.0%} of {surest.num_judged} where the target is surest (entropy below "
            f"{surest.high:.1f} nats), {least_sure.acceptance:.0%} of {least_sure.num_judged} where it is least sure "
            f"(from {least_sure.low:.1f})"
        )
    return text
