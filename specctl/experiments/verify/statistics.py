"""P-values that hold for any number of values, with numpy alone. Knows nothing of where the numbers come from.

No normal approximation: a sum of events that are nearly certain is a lattice whose tails are far heavier. Each
p-value is an inequality, so that a run on an exact pair has p <= a with a probability of at most a, whatever a.

Sources: Massart, Ann. Probab. 18 (1990), corollary 1 (the tight constant of the Dvoretzky-Kiefer-Wolfowitz
inequality); Ville's inequality for a product of exponential factors of mean 1 (Howard et al. 1808.03204),
with stakes that may look at all before them (Waudby-Smith and Ramdas 2010.09686).

Shapes: N values in the order in which they came, J bets.
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_GUESSED_VALUES, _GUESSED_VARIANCE = 10, 0.25  # what stakes go by before there are values


def uniformity(values: Floats) -> float:
    """P-value of the Kolmogorov-Smirnov distance D of values [N] to uniform ones on [0, 1]: 2 exp(-2 N D^2) at most."""
    ordered, count = np.sort(values), len(values)
    steps = np.arange(count + 1) / count
    distance = max(np.max(steps[1:] - ordered), np.max(ordered - steps[:-1]))
    return min(1.0, 2 * math.exp(-2 * count * distance**2))


def stakes(variance: Floats, rate: float) -> Floats:
    """What to bet on each of N values, from the variances before it alone: of the most use at p-values near `rate`.

    The best constant stake for a sum of variance V is about sqrt(2 log(1 / rate) / V), and less where V is small;
    V is taken to go on as it did so far.
    """
    count = np.arange(_GUESSED_VALUES, _GUESSED_VALUES + len(variance))
    so_far = _GUESSED_VALUES * _GUESSED_VARIANCE + np.cumsum(variance) - variance
    best = np.sqrt(2 * math.log(1 / rate) * count / (so_far * len(variance)))
    return best / (1 + best / 3)


def event_bets(probability: Floats, happened: Floats, stake: Floats) -> Floats:
    """log(exp(s y) / E exp(s y)) for events y of given probabilities: it pays where more (s > 0) or fewer happen."""
    return stake * happened - np.log1p(probability * np.expm1(stake))


def product_bets(first: Floats, second: Floats, stake: float) -> Floats:
    """The same for y = first * second, with `second` uniform on [-1/2, 1/2] given all before it."""
    half = stake * first / 2
    tiny = np.abs(half) < 1e-4
    safe = np.where(tiny, 1.0, half)
    return stake * first * second - np.where(tiny, half**2 / 6, np.log(np.sinh(safe) / safe))


def most_won(bets: Floats) -> float:
    """The largest logarithm that the product of the factors exp(bets) [N] ever had; 0 before the first."""
    return max(0.0, float(np.cumsum(bets).max(initial=0.0)))


def p_value_of(bets: list[Floats]) -> float:
    """P-value of J bets [N] with the means 1 given all before: the mean of their J products reaches 1/a
    at any time with a probability of at most a."""
    wealth = np.logaddexp.reduce(np.cumsum(np.stack(bets), axis=1), axis=0) - math.log(len(bets))
    return math.exp(-max(0.0, float(wealth.max(initial=0.0))))


def normal_quantile(probability: float) -> float:
    return NormalDist().inv_cdf(probability)


def holm(p_values: list[float]) -> list[float]:
    """P-values adjusted for being several (Holm, Scand. J. Stat. 6, 1979): reject those at most the false-alarm rate.

    The least of them is the p-value of all together.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, so_far = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        so_far = max(so_far, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = so_far
    return adjusted
