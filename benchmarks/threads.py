"""How many CPU threads a contender is the fastest with: the way in which a run chooses its own models' threads."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from specctl.hardware import num_cores

_ROUNDS = 2


def candidates(wanted: int | Literal["auto"]) -> list[int]:
    """The counts that are tried; wanted: as runtime.threads."""
    if wanted != "auto":
        return [wanted]
    cores = num_cores()
    return sorted({1, max(1, cores // 2), cores})


def fastest(counts: Sequence[int], seconds_with: Callable[[int], float]) -> int:
    """The count that took the fewest seconds in its better round.

    All counts are timed in turn, twice, so that a passing disturbance falls on more than one. One that stands alone
    is not timed.
    """
    if len(counts) == 1:
        return counts[0]
    seconds = dict.fromkeys(counts, math.inf)
    for _ in range(_ROUNDS):
        for count in counts:
            seconds[count] = min(seconds[count], seconds_with(count))
    return min(counts, key=seconds.__getitem__)
