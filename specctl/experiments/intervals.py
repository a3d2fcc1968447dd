"""How sure a measured speed is: bootstrap intervals over prompts, and figures by prompt and by category.

The unit that is drawn again and again is the prompt, the same ones for plain decoding and for what
is compared with it: prompts differ far more than repeats do, and a pair of runs on one prompt shares
its difficulty. Sources: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13; the
percentiles are those of Hesterberg 1411.5279, section 3.3, wider for few prompts.

Shapes: P prompts, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from specctl.experiments.workload import LEAST_PROMPTS, EncodedPrompt

Floats = NDArray[np.float64]
Interval = tuple[float, float]

RESAMPLES = 2000
_OUTSIDE = 0.025  # of the probability, on each side


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timings:
    """One way to decode, prompt by prompt, each array [P].

    tokens: new tokens of a run. seconds: of its rounds. rounds: target passes of a run.
    """

    tokens: Floats
    seconds: Floats
    rounds: Floats

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())

    def only(self, chosen: Sequence[int]) -> "Timings":
        """Those of some prompts."""
        at = list(chosen)
        return Timings(tokens=self.tokens[at], seconds=self.seconds[at], rounds=self.rounds[at])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFigures:
    """One prompt under one way to decode; speedup over plain decoding of the same prompt."""

    id: str
    category: str | None
    tokens_per_second: float
    speedup: float | None
    mean_acceptance_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryFigures:
    """The prompts of one category together; None is the prompts that have none."""

    category: str | None
    num_prompts: int
    tokens_per_second: float
    speedup: float | None
    speedup_interval: Interval | None
    mean_acceptance_length: float


def speedup_interval(timings: Timings, plain: Timings | None, seed: int) -> Interval | None:
    """95 % interval of the speed over `plain`'s, paired by prompt.

    None without plain decoding, for plain decoding itself, and for fewer than 6 prompts.
    """
    if plain is None or plain is timings or len(plain.tokens) < LEAST_PROMPTS:
        return None
    picks = resamples(len(plain.tokens), seed)
    speedups = _ratio(timings.tokens, timings.seconds, picks) / _ratio(plain.tokens, plain.seconds, picks)
    return interval_of(speedups, len(plain.tokens))


def length_interval(timings: Timings, seed: int) -> Interval | None:
    """95 % interval of the tokens per target pass; None for fewer than 6 prompts."""
    if len(timings.tokens) < LEAST_PROMPTS:
        return None
    lengths = _ratio(timings.tokens, timings.rounds, resamples(len(timings.tokens), seed))
    return interval_of(lengths, len(timings.tokens))


def resamples(num_prompts: int, seed: int) -> NDArray[np.int64]:
    """Indices of prompts drawn with replacement, [R, P]; the same for every way to decode."""
    return np.random.default_rng(seed).integers(num_prompts, size=(RESAMPLES, num_prompts))


def _ratio(numerator: Floats, denominator: Floats, picks: NDArray[np.int64]) -> Floats:
    """The ratio of totals in each resample, [R]."""
    totals: Floats = numerator[picks].sum(1) / denominator[picks].sum(1)
    return totals


def interval_of(values: Floats, num_prompts: int) -> Interval:
    """95 % interval from a figure's values in all resamples of so many prompts."""
    outside = _expanded(num_prompts)
    low, high = np.quantile(values, (outside, 1 - outside))
    return float(low), float(high)


def _expanded(num_prompts: int) -> float:
    """The share of resamples to leave out on each side, so that few prompts give as wide an interval as Student's t.

    Resamples of n values vary less than n - 1 degrees of freedom do: Phi(-sqrt(n / (n - 1)) t).
    """
    t = t_quantile(1 - _OUTSIDE, num_prompts - 1)
    return NormalDist().cdf(-((num_prompts / (num_prompts - 1)) ** 0.5) * t)


def t_quantile(probability: float, degrees: int) -> float:
    """Student's t, by the expansion of Abramowitz and Stegun, 26.7.5: within 1 % from 5 degrees of freedom on."""
    z = NormalDist().inv_cdf(probability)
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return t + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)


def by_prompt(prompts: Sequence[EncodedPrompt], timings: Timings, plain: Timings | None) -> list[PromptFigures]:
    found = []
    for index, prompt in enumerate(prompts):
        speed = timings.only([index]).tokens_per_second
        found.append(
            PromptFigures(
                id=prompt.id,
                category=prompt.category,
                tokens_per_second=speed,
                speedup=speed / plain.only([index]).tokens_per_second if plain else None,
                mean_acceptance_length=float(timings.tokens[index] / timings.rounds[index]),
            )
        )
    return found


def by_category(
    prompts: Sequence[EncodedPrompt], timings: Timings, plain: Timings | None, seed: int
) -> list[CategoryFigures]:
    """Categories in the order in which they first appear; none where no prompt has one."""
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    if categories == [None]:
        return []
    found = []
    for category in categories:
        chosen = [index for index, prompt in enumerate(prompts) if prompt.category == category]
        ours, theirs = timings.only(chosen), plain.only(chosen) if plain else None
        found.append(
            CategoryFigures(
                category=category,
                num_prompts=len(chosen),
                tokens_per_second=ours.tokens_per_second,
                speedup=ours.tokens_per_second / theirs.tokens_per_second if theirs else None,
                speedup_interval=speedup_interval(ours, None if plain is timings else theirs, seed),
                mean_acceptance_length=float(ours.tokens.sum() / ours.rounds.sum()),
            )
        )
    return found
