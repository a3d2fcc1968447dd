"""Ctrl+C: wherever in a command it arrives, it ends in `Interrupted`, whose line says what is kept.

What is interrupted may make an error of its own out of KeyboardInterrupt (an import that fails half-way), and
typer makes a silent exit of it; so the signal is noted when it arrives.
"""

import atexit
import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from specctl.errors import Interrupted


class _CtrlC(KeyboardInterrupt):
    """Of its own class: where KeyboardInterrupt itself has passed through an exec(), Python ends by the signal."""


_NOTHING = "nothing was saved"
_kept = _NOTHING


def keep(what: str) -> None:
    """From now on, if the command is interrupted, this is kept: the rest of the line after "interrupted; "."""
    global _kept
    _kept = what


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted for what Ctrl+C led to in the block.

    A signal that the shell told this process to ignore, as a background job, stays ignored.
    """
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        raise _CtrlC

    keep(_NOTHING)
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    try:
        if ours:
            signal.signal(signal.SIGINT, note)
        yield
    except Interrupted:
        raise
    except BaseException as error:
        exiting = isinstance(error, SystemExit)  # of a command that ended well, whatever became of the signal
        if _came_of_one(error) or (arrived and not exiting):
            raise Interrupted(f"interrupted; {_kept}") from None
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
            atexit.unregister(_ignore)
            atexit.register(_ignore)  # last, so that it is called first


def _ignore() -> None:
    """While Python shuts down, which takes a while with torch, there is nothing left to interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _came_of_one(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
