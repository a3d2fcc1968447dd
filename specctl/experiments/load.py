"""What else used the processors during a measurement: other processes, and time that the hypervisor took.

From Linux's `/proc/stat`; elsewhere nothing is known and nothing counts as disturbed. A measurement is judged by
this alone and never by its own speed, which would choose among results. Knows nothing about decoding.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6)  # columns of /proc/stat: user, nice, system, irq, softirq; user holds guests
_STEAL = 7
_SHARE, _LEAST = 0.1, 0.03  # of the time, and seconds (clocks tick every hundredth): less is no disturbance


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Seconds since some moments of their own: on the clock, busy and stolen on our cores together, and our own."""

    clock: float
    busy: float
    stolen: float
    own: float
    num_cores: int


def read_load() -> Load | None:
    """The present counts of the cores that this process may run on; None where the system does not tell."""
    try:
        lines, cores = _STAT.read_text(encoding="ascii").splitlines(), os.sched_getaffinity(0)
        return load_of(lines, cores, os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]), perf_counter())
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def load_of(lines: Sequence[str], cores: set[int], ticks: int, own: float, clock: float) -> Load:
    """Sum the lines `cpuN` of our cores; ticks: their counts a second."""
    busy = stolen = 0
    for line in lines:
        name, *counts = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            busy += sum(int(counts[column]) for column in _BUSY)
            stolen += int(counts[_STEAL])
    return Load(clock=clock, busy=busy / ticks, stolen=stolen / ticks, own=own, num_cores=len(cores))


def is_disturbed(before: Load | None, after: Load | None, threads: int) -> bool:
    """Whether others kept cores busy that `threads` of ours would have used, for a tenth of the time or more.

    What others do on cores that we leave free is no disturbance.
    """
    if before is None or after is None:
        return False
    seconds = after.clock - before.clock
    others = (after.busy - before.busy) - (after.own - before.own)
    free = max(0, after.num_cores - threads) * seconds
    lost = max(0.0, others - free) + after.stolen - before.stolen
    return lost > max(_SHARE * seconds, _LEAST)
