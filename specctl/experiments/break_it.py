"""What makes speculation fail: the same K with drafts that agree with the target less and less."""

from dataclasses import dataclass

from specctl import theory
from specctl.errors import UsageError
from specctl.experiments.measure import Progress, Variant, acceptance_on, measure_speeds
from specctl.experiments.pair import Pair
from specctl.experiments.timing import measure_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakRow:
    """One drafter at the run's K; the baseline is plain decoding and has no draft figures.

    expected_acceptance is alpha: mean of sum_x min(p, q), on prompts other than the timed ones.
    """

    name: str
    tokens_per_second: float
    spread: float
    speedup: float
    acceptance_rate: float | None = None
    expected_acceptance: float | None = None
    mean_acceptance_length: float | None = None
    cost_ratio: float | None = None
    break_even_alpha: float | None = None
    cause: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakIt:
    k: int
    temperature: float
    rows: list[BreakRow]


def break_it(pair: Pair, progress: Progress | None = None) -> BreakIt:
    """Compare plain decoding with every drafter of the config at the same K."""
    k, names = pair.config.decoding.num_speculative_tokens, list(pair.config.drafters)
    if k == 0 or not names:
        raise UsageError("break-it needs drafters in the config and decoding.num_speculative_tokens of 1 or more")
    other_prompts = pair.prompts(pair.config.sweep.num_prompts or 4, offset=pair.config.sweep.num_prompts or 4)
    agreements = {name: acceptance_on(pair, name, k, other_prompts) for name in names}
    costs = {name: measure_costs(pair, name, [k]) for name in names}
    baseline = Variant("none", 0)
    speeds = measure_speeds(pair, [baseline, *(Variant(name, k) for name in names)], progress)
    plain = speeds[baseline]
    rows = [
        BreakRow(name="baseline", tokens_per_second=plain.tokens_per_second, spread=plain.spread, speedup=1.0),
    ]
    for name in names:
        speed, cost = speeds[Variant(name, k)], costs[name]
        alpha = agreements[name].expected_acceptance
        prices = (cost.cost_ratio, cost.verify_cost[k + 1], cost.overhead[k])
        rows.append(
            BreakRow(
                name=name,
                tokens_per_second=speed.tokens_per_second,
                spread=speed.spread,
                speedup=speed.tokens_per_second / plain.tokens_per_second,
                acceptance_rate=speed.stats.acceptance_rate,
                expected_acceptance=alpha,
                mean_acceptance_length=speed.stats.mean_acceptance_length,
                cost_ratio=cost.cost_ratio,
                break_even_alpha=theory.break_even_alpha(k, *prices),
                cause=theory.cause(alpha, k, *prices),
            )
        )
    return BreakIt(k=k, temperature=pair.config.decoding.temperature, rows=rows)
