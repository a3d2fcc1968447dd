"""The speedup that theory gives: tokens from other prompts over what their rounds cost, timed apart.

S = tokens / sum over rounds of cost(tokens drafted), in plain steps: docs/theory.md's S(K) with every round at
its own size, short last rounds and rounds without a draft among them. To both sides comes what the first rounds of
each request take beyond the others. Nothing is fitted, and nothing is taken from the measurement that it is held
against. The interval is a bootstrap over those prompts and over the trials
of the timing together (`intervals.py` says which percentiles).

Shapes: P prompts, R resamples, N trials, S sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.experiments.agreement import Passes
from specctl.experiments.intervals import RESAMPLES, Floats, Interval, interval_of, resamples
from specctl.experiments.timing import Costs
from specctl.experiments.workload import LEAST_PROMPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """interval: 95 %; None where fewer than 6 prompts were left to predict from."""

    speedup: float
    interval: Interval | None


def predict(passes: Passes, costs: Costs, seed: int) -> Prediction:
    """The speedup over plain decoding of what took these passes, at these costs."""
    sizes = sorted(passes.rounds)
    counts = np.stack([passes.rounds[size] for size in sizes], 1)  # [P, S]
    cost = np.array([costs.round_cost(size) for size in sizes])
    plain = passes.tokens + passes.requests * costs.plain_opening  # [P], in plain steps
    opening = passes.requests * costs.round_opening.get(sizes[-1], 0.0)
    speedup = float(plain.sum() / (counts.sum(0) @ cost + opening.sum()))
    num_prompts = len(passes.tokens)
    if num_prompts < LEAST_PROMPTS:
        return Prediction(speedup=speedup, interval=None)
    picks = resamples(num_prompts, seed)  # [R, P]
    varied = _varied(costs, sizes, seed)  # [R, S]
    speedups = plain[picks].sum(1) / ((counts[picks].sum(1) * varied).sum(1) + opening[picks].sum(1))
    return Prediction(speedup=speedup, interval=interval_of(speedups, num_prompts))


def _varied(costs: Costs, sizes: Sequence[int], seed: int) -> Floats:
    """The cost of a round of each size under resampled trials, [R, S]."""
    generator, num_trials = np.random.default_rng(seed + 1), costs.num_trials
    trials = generator.integers(num_trials, size=(RESAMPLES, num_trials))
    return np.stack([costs.round_cost(size, trials) for size in sizes], 1)


def agrees(prediction: Prediction, measured: float, interval: Interval | None) -> bool | None:
    """Whether the two differ by no more than both intervals together allow; None where one has no interval.

    Both are ratios, so distances are taken in logarithms: each interval's half on the side of the other figure,
    squared and added.
    """
    if prediction.interval is None or interval is None:
        return None
    distance = math.log(prediction.speedup / measured)
    low, high = (prediction.interval, interval) if distance > 0 else (interval, prediction.interval)
    above, below = (prediction.speedup, measured) if distance > 0 else (measured, prediction.speedup)
    return abs(distance) <= math.hypot(math.log(above / low[0]), math.log(high[1] / below))
