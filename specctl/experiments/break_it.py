"""What makes speculation fail: the same K with drafts that agree with the target less and less."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from specctl import theory
from specctl.errors import UsageError
from specctl.experiments.agreement import Agreement, agreement_on
from specctl.experiments.intervals import CategoryFigures, Interval, PromptFigures
from specctl.experiments.measure import Bench, Disturbance, Progress, Speed, Variant, shared_figures
from specctl.experiments.pair import Pair
from specctl.experiments.prediction import agrees, predict
from specctl.experiments.timing import Costs, CostTimer, interleaved
from specctl.experiments.trace import Trace
from specctl.experiments.watch import Judged
from specctl.experiments.workload import Workload, workload


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
    pays: whether the measured speedup is above 1, None where its interval holds 1 or there is none. cause: what
    would help more, perfect agreement or a free draft; None where nothing is known or it pays.
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
    round_cost: float | None = None
    break_even_alpha: float | None = None
    predicted_speedup: float | None = None
    predicted_interval: Interval | None = None
    prediction_agrees: bool | None = None
    pays: bool | None = None
    cause: theory.Cause | None = None
    speedup_interval: Interval | None = None
    mean_acceptance_length_interval: Interval | None = None
    by_category: list[CategoryFigures] = field(default_factory=list)
    by_prompt: list[PromptFigures] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakIt:
    """ignores_eos: whether texts went on behind their end."""

    k: int
    temperature: float
    rows: list[BreakRow]
    disturbance: Disturbance = field(default_factory=Disturbance)
    ignores_eos: bool = False
    note: str | None = None
    lossy: bool = False


def break_it(pair: Pair, names: Sequence[str], progress: Progress | None = None, trace: Trace | None = None) -> BreakIt:
    """Compare plain decoding with the named drafters at the same K.

    `trace` takes down the rounds of the prompts that are not timed.
    """
    k, sweep = pair.config.decoding.num_speculative_tokens, pair.config.sweep
    if k == 0 or not names:
        raise UsageError("break-it needs drafters in the config and decoding.num_speculative_tokens of 1 or more")
    work, seed = workload(pair), pair.config.seed
    if trace and not work.held_out:
        raise UsageError(f"--trace takes down prompts that are not timed. {work.note}")
    others = [prompt.token_ids for prompt in work.held_out]
    repeats = -(-len(work.measured) * sweep.repeats // max(1, len(others)))
    if others:
        pair.artefacts.narrate(f"counting what each drafter accepts on {len(others)} other prompts")
    agreements = {name: agreement_on(pair, name, k, others, repeats, trace) for name in names} if others else {}
    limits = entropy_limits([position for agreement in agreements.values() for position in agreement.judged])
    timers = {name: CostTimer(pair, name, _sizes(k), cached=work.mean_length) for name in names}
    bench, plain = Bench(pair, work.measured, progress), Variant("none", 0)
    bench.run([plain, *(Variant(name, k) for name in names)], sweep.repeats, interleaved(list(timers.values())))
    baseline = bench.speed(plain)
    return BreakIt(
        k=k,
        temperature=pair.config.decoding.temperature,
        rows=[
            BreakRow(name="baseline", **shared_figures(baseline, baseline, work.measured, seed)),
            *(
                _row(
                    name,
                    k,
                    bench.speed(Variant(name, k)),
                    baseline,
                    work,
                    seed,
                    costs=timers[name].costs(),
                    agreement=agreements.get(name),
                    limits=limits,
                )
                for name in names
            ),
        ],
        disturbance=bench.disturbance,
        ignores_eos=sweep.ignore_eos,
        note=work.note,
        lossy=pair.is_lossy(k),
    )


def _sizes(k: int) -> set[int]:
    """Drafts of K tokens, and some shorter ones: not every round drafts all."""
    return {size for size in (1, 2, 4, 8, k // 2, k) if 1 <= size <= k}


def _row(
    name: str,
    k: int,
    speed: Speed,
    plain: Speed,
    work: Workload,
    seed: int,
    *,
    costs: Costs,
    agreement: Agreement | None,
    limits: Sequence[float],
) -> BreakRow:
    figures = shared_figures(speed, plain, work.measured, seed)
    interval, costs_of_k = figures["speedup_interval"], (costs.cost_ratio, costs.verify_cost[k + 1], costs.overhead[k])
    alpha = agreement.expected_acceptance if agreement else None
    prediction = predict(agreement.passes, costs, seed) if agreement else None
    pays = None if interval is None or interval[0] <= 1 <= interval[1] else bool(interval[0] > 1)
    return BreakRow(
        name=name,
        expected_acceptance=alpha,
        conditional_acceptance=agreement.stats.conditional_acceptance if agreement else None,
        acceptance_by_entropy=by_entropy(agreement.judged, limits) if agreement else None,
        cost_ratio=costs.cost_ratio,
        round_cost=costs.round_cost(k),
        break_even_alpha=theory.break_even_alpha(k, *costs_of_k),
        predicted_speedup=prediction.speedup if prediction else None,
        predicted_interval=prediction.interval if prediction else None,
        prediction_agrees=agrees(prediction, figures["speedup"], interval) if prediction else None,
        pays=pays,
        cause=None if pays or alpha is None else theory.cause(alpha, k, *costs_of_k),
        **figures,
    )


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
