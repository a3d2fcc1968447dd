"""P-values, with numpy and the standard library alone. Knows nothing of where the numbers come from.

Sources: Kolmogorov's limit with Stephens's correction for finite samples (J. R. Stat. Soc. B 32, 1970);
the rest is the normal distribution.
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def uniformity(values: Floats) -> float:
    """P-value of the Kolmogorov-Smirnov test that values are uniform on [0, 1]; good from about 30 values on."""
    ordered, count = np.sort(values), len(values)
    steps = np.arange(count + 1) / count
    distance = max(np.max(steps[1:] - ordered), np.max(ordered - steps[:-1]))
    root = math.sqrt(count)
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.3:
        return 1.0  # 1 - 1e-5 and more; the series below would need many terms
    series = sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 20))
    return float(min(1.0, max(0.0, 2 * series)))


def two_sided(z: float) -> float:
    """P-value of a standard normal value."""
    return math.erfc(abs(z) / math.sqrt(2))


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
