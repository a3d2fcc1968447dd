"""At which K does speculation pay? Speed for each K, beside the speed that theory predicts.

Every K is measured alike first. Then the contenders for the best are measured again, at looks fixed beforehand
(`choice.py`), as long as the time lasts. What is said of the chosen K comes from fresh repeats, which had no part
in choosing it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from specctl.errors import UsageError
from specctl.experiments import choice
from specctl.experiments.agreement import Agreement, agreement_on
from specctl.experiments.choice import Choice
from specctl.experiments.intervals import CategoryFigures, Interval, PromptFigures
from specctl.experiments.measure import Bench, Disturbance, Progress, Variant, shared_figures
from specctl.experiments.pair import Pair
from specctl.experiments.prediction import Prediction, agrees, predict
from specctl.experiments.timing import Costs, CostTimer, interleaved
from specctl.experiments.trace import Trace
from specctl.experiments.workload import LEAST_PROMPTS, Workload, workload


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One K; K = 0 is plain decoding. Intervals are 95 %, over prompts; spread is `Speed.spread`, tokens/s.

    predicted_speedup: None where no prompts were left to predict from. prediction_agrees: whether it and the measured
    speedup are as close as their intervals allow; None where one has none. is_fresh: from repeats of its own.
    """

    k: int
    tokens_per_second: float
    spread: float
    speedup: float | None
    predicted_speedup: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    speedup_interval: Interval | None = None
    predicted_interval: Interval | None = None
    prediction_agrees: bool | None = None
    mean_acceptance_length_interval: Interval | None = None
    num_repeats: int = 1
    is_fresh: bool = False
    by_category: list[CategoryFigures] = field(default_factory=list)
    by_prompt: list[PromptFigures] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """best_k: None where two K cannot be told apart, which `undecided` names then.

    margin: the chosen K's speed is, beyond doubt, at most that share below the fastest. num_repeats: of the contenders,
    to choose. conditional_acceptance: at the largest K, from prompts other than the measured ones. overhead: by K,
    in plain steps. ignores_eos: whether texts went on behind their end. note: what a reader must know about the
    columns, if anything. lossy: whether K > 0 gives another law.
    """

    drafter: str
    temperature: float
    rows: list[SweepRow]
    best_k: int | None
    undecided: tuple[int, ...] = ()
    margin: float | None = None
    num_repeats: int = 1
    cost_ratio: float | None
    verify_cost: dict[int, float]
    overhead: dict[int, float]
    conditional_acceptance: list[float]
    disturbance: Disturbance = field(default_factory=Disturbance)
    ignores_eos: bool = False
    note: str | None = None
    lossy: bool = False


def sweep_k(
    pair: Pair,
    drafter: str,
    progress: Progress | None = None,
    trace: Trace | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Sweep:
    """Measure every K of `sweep.k`; predict each from acceptance on other prompts and costs timed apart.

    `trace` takes down the rounds of the prompts that are not timed.
    """
    if drafter == "none":
        raise UsageError("sweep-k needs a drafter; choose one with --drafter NAME")
    ks, work, sweep = pair.ks(drafter), workload(pair), pair.config.sweep
    if trace and not work.held_out:
        raise UsageError(f"--trace takes down prompts that are not timed. {work.note}")
    pair.warm_up([drafter], ks)
    timer = CostTimer(pair, drafter, ks, cached=work.mean_length) if ks[-1] > 0 else None
    agreements = _agreements(pair, drafter, ks, work, trace) if timer else {}
    variants = {k: Variant(drafter, k) if k else Variant("none", 0) for k in ks}
    bench, between = Bench(pair, work.measured, progress), interleaved([timer] if timer else [])
    bench.run([variants[k] for k in ks], sweep.repeats, between)
    chosen = _choose(bench, variants, len(work.measured), sweep.repeats, sweep.max_seconds, clock)
    to_choose = fresh_from = bench.num_repeats
    fresh = chosen.leading if chosen.best is None else (chosen.best,)
    if len(ks) > 1 and fresh != (0,):
        bench.run([variants[k] for k in ks if k == 0 or k in fresh], sweep.repeats)
    else:
        fresh = ()
    costs = timer.costs() if timer else None
    return Sweep(
        drafter=drafter,
        temperature=pair.config.decoding.temperature,
        rows=[
            _row(
                k,
                bench,
                variants,
                work,
                pair.config.seed,
                window=(fresh_from, None) if k in fresh else (0, sweep.repeats),
                prediction=_predict(k, agreements, costs, pair.config.seed),
            )
            for k in ks
        ],
        best_k=chosen.best,
        undecided=chosen.leading if chosen.best is None else (),
        margin=chosen.margin,
        num_repeats=to_choose,
        cost_ratio=costs.cost_ratio if costs else None,
        verify_cost=costs.verify_cost if costs else {1: 1.0},
        overhead=costs.overhead if costs else {},
        conditional_acceptance=agreements[ks[-1]].stats.conditional_acceptance if agreements else [],
        disturbance=bench.disturbance,
        ignores_eos=sweep.ignore_eos,
        note=work.note if costs else None,
        lossy=pair.is_lossy(ks[-1]),
    )


def _agreements(
    pair: Pair, drafter: str, ks: Sequence[int], work: Workload, trace: Trace | None
) -> dict[int, Agreement]:
    """What each K accepts on the prompts that are not timed, from as many requests as a row is measured on."""
    others = [prompt.token_ids for prompt in work.held_out]
    if not others:
        return {}
    repeats = -(-len(work.measured) * pair.config.sweep.repeats // len(others))
    pair.artefacts.narrate(f"counting what each K accepts on {len(others)} other prompts, for the prediction")
    longest = ks[-1]
    shorter = {k: agreement_on(pair, drafter, k, others, repeats, judges=False) for k in ks if 0 < k < longest}
    return {**shorter, longest: agreement_on(pair, drafter, longest, others, repeats, trace)}


def _choose(
    bench: Bench,
    variants: dict[int, Variant],
    num_prompts: int,
    repeats: int,
    max_seconds: float,
    clock: Callable[[], float],
) -> Choice:
    """Look, and measure the contenders further, until the choice is made, the looks are over or the time is."""

    def looked(ks: Sequence[int], is_last: bool = False) -> Choice:
        by_prompt = num_prompts >= LEAST_PROMPTS
        return choice.look(
            {k: bench.speed(variants[k]).timings if by_prompt else bench.runs(variants[k]) for k in ks}, is_last=is_last
        )

    started, chosen = clock(), looked(list(variants))
    for number in choice.LOOKS[1:]:
        more = number * repeats - bench.num_repeats
        expected = sum(bench.speed(variants[k]).timings.seconds.sum() for k in chosen.contenders) * more
        if not chosen.is_open or clock() - started + expected > max_seconds:
            break
        bench.run([variants[k] for k in chosen.contenders], more)
        chosen = looked(chosen.contenders)
    return looked(chosen.contenders, is_last=True) if chosen.best is None else chosen


def _row(
    k: int,
    bench: Bench,
    variants: dict[int, Variant],
    work: Workload,
    seed: int,
    *,
    window: tuple[int, int | None],
    prediction: Prediction | None,
) -> SweepRow:
    """window: the repeats that count, of this K and of plain decoding beside it."""
    speed = bench.speed(variants[k], *window)
    plain = speed if k == 0 else bench.speed(variants[0], *window) if 0 in variants else None
    figures = shared_figures(speed, plain, work.measured, seed)
    interval = figures["speedup_interval"]
    return SweepRow(
        k=k,
        predicted_speedup=prediction.speedup if prediction else None,
        predicted_interval=prediction.interval if prediction else None,
        prediction_agrees=agrees(prediction, figures["speedup"], interval) if prediction and plain else None,
        num_repeats=bench.num_repeats_of(variants[k], *window),
        is_fresh=window[0] > 0,
        **figures,
    )


def _predict(k: int, agreements: dict[int, Agreement], costs: Costs | None, seed: int) -> Prediction | None:
    if k == 0 or costs is None:
        return Prediction(speedup=1.0, interval=None)
    return predict(agreements[k].passes, costs, seed) if k in agreements else None
