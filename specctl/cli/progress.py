"""How far long work is, on stderr: a bar on a terminal, elsewhere a plain line now and then for whoever reads a log."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from time import monotonic

from specctl.progress import Update

SECONDS_BETWEEN_LINES = 20.0
_MANY = 1_000_000  # from here on a bar shortens its numbers


@contextlib.contextmanager
def show_progress(what: str, unit: str) -> Iterator[Update]:
    """A `Progress`. what: the work, such as "training target". unit: what is counted, in the singular."""
    if not sys.stderr.isatty():
        yield Lines(what, unit, say=lambda line: print(line, file=sys.stderr, flush=True))
        return
    from tqdm import tqdm

    with tqdm(desc=what, unit=unit, file=sys.stderr, dynamic_ncols=True) as bar:

        def update(done: int, total: int, note: str = "") -> None:
            bar.total, bar.unit_scale = total, total >= _MANY
            if note:
                bar.set_postfix_str(note, refresh=False)
            bar.update(done - bar.n)

        yield update


class Lines:
    """An `Update` that says a line where a while has passed since the one before, or since the beginning.

    say: takes the line. clock: seconds since any moment.
    """

    def __init__(self, what: str, unit: str, *, say: Callable[[str], None], clock: Callable[[], float] = monotonic):
        self._what, self._unit, self._say, self._clock = what, unit, say, clock
        self._told, self._note = clock(), ""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        self._note, now = note or self._note, self._clock()
        if now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            self._say(f"{self._what}: {done:,} of {total:,} {self._unit}s" + (f", {self._note}" if self._note else ""))
