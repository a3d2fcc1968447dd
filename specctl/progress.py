"""How far long work is: whoever does it tells, whoever asked for it shows.

Knows nothing about terminals or clocks.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Update(Protocol):
    """What work calls as it goes on."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """note: how it goes, in a few words that hold until the next ones."""


class Progress(Protocol):
    """What shows the progress of one piece of work after the other."""

    def __call__(self, what: str, unit: str) -> AbstractContextManager[Update]:
        """Begin to show a piece of work; it is done when the context ends. unit: what is counted, in the singular."""


@contextmanager
def silent(what: str, unit: str) -> Iterator[Update]:
    """Shows nothing."""

    def nothing(done: int, total: int, note: str = "") -> None:
        pass

    yield nothing
