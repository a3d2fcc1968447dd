"""Which K is best, beyond doubt, and what must be measured next to tell: pure, figures in, decision out.

The best K is the smallest whose speed is within a margin of every other's: a lower bound on its speed over each
other K's, from the same units (prompts, or single runs where prompts are few), is above 1 - margin. Bounds are
Student's t on the ratio's logarithm, linearised (Cochran, Sampling Techniques, 1977, section 6.4, for a ratio of
totals). The error rate is shared out over the looks at the data, which are fixed beforehand, and over the K that
might be chosen wrongly (Bonferroni). What is certainly not within the margin is no contender any more.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specctl.experiments.intervals import Timings, t_quantile

LOOKS = (1, 2, 4, 8, 16)  # in multiples of sweep.repeats
MARGIN, LAST_MARGIN = 0.03, 0.05
_ERROR_RATE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """best: the chosen K, None while it is not certain. margin: within which of the fastest it is, beyond doubt.

    contenders: the K that may still be the best, in order. leading: of them the two that look best, the smaller first;
    one where there is no other.
    """

    best: int | None
    margin: float | None
    contenders: tuple[int, ...]
    leading: tuple[int, ...]

    @property
    def is_open(self) -> bool:
        """Whether more measuring could change or make the choice."""
        return self.best is None or self.best != self.contenders[0]


def look(timings: Mapping[int, Timings], *, is_last: bool = False) -> Choice:
    """Judge K by the same units each. At the last look within 5 % will do, where no K is known to be within 3 %."""
    ks = sorted(timings)
    if len(ks) == 1:
        return Choice(best=ks[0], margin=0.0, contenders=(ks[0],), leading=(ks[0],))
    low, high = _bounds([timings[k] for k in ks])
    for margin in (MARGIN, LAST_MARGIN) if is_last else (MARGIN,):
        threshold = math.log(1 - margin)
        within = [k for index, k in enumerate(ks) if (low[index] >= threshold).all()]
        if within:
            break
    contenders = tuple(k for index, k in enumerate(ks) if (high[index] >= math.log(1 - MARGIN)).all())
    if len(contenders) == 1 and not within:
        within = list(contenders)
    speeds = {k: timings[k].tokens_per_second for k in ks}
    return Choice(
        best=within[0] if within else None,
        margin=margin if within else None,
        contenders=tuple(sorted({*contenders, *within[:1]})),
        leading=_leading(speeds, contenders),
    )


def _leading(speeds: Mapping[int, float], contenders: tuple[int, ...]) -> tuple[int, ...]:
    """The fastest, and the smallest that looks as good to within half the margin; else the second fastest."""
    by_speed = sorted(contenders or speeds, key=lambda k: -speeds[k])
    fastest, *others = by_speed
    near = [k for k in others if k < fastest and speeds[k] >= (1 - MARGIN / 2) * speeds[fastest]]
    return tuple(sorted({fastest, *([min(near)] if near else others[:1])}))


def _bounds(timings: list[Timings]) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds on log(speed of i / speed of j), [K, K] each; 0 on the diagonal.

    With a single unit nothing is known.
    """
    num_units, count = len(timings[0].tokens), len(timings)
    logs = np.log([each.tokens_per_second for each in timings])
    distance = logs[:, None] - logs
    if num_units < 2:
        nothing = np.where(np.eye(count, dtype=bool), 0.0, np.inf)
        return -nothing, nothing
    # What each unit moves the logarithm of a speed by: [K, U], each row summing to 0.
    shares = np.array([each.tokens / each.tokens.sum() - each.seconds / each.seconds.sum() for each in timings])
    moved = shares[:, None] - shares
    deviation = np.sqrt(num_units / (num_units - 1) * (moved**2).sum(2))
    rate = _ERROR_RATE / len(LOOKS) / max(1, count - 1)
    half = t_quantile(1 - rate, num_units - 1) * deviation
    return distance - half, distance + half
