"""One process at a time: locks on files, which the system lets go of when a process ends, however it ends.

Where there are no such locks (Windows, some network drives) nothing is locked. Knows nothing about what is guarded.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_UNKNOWN = (errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)  # what file systems say that have none


def take(handle: int, *, wait: bool = True) -> bool:
    """Lock what a handle is open on, until it is closed; whether it is ours now. wait: until others let go of it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
    return True


def is_at(handle: int, path: Path) -> bool:
    """Whether a path still leads to what a handle is open on: not to nothing, nor to another file."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def alone(path: Path, on_wait: Callable[[], None]) -> Iterator[bool]:
    """Hold a lock file for the block; yield whether there was a wait for another process.

    on_wait: called before such a wait. The file is there while it is held, and what a killed process left is no lock.
    """
    waited = False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not take(handle, wait=False):
                if not waited:
                    on_wait()
                waited = True
                take(handle)
            if not is_at(handle, path):  # whoever had it has removed it: a later one may hold another by that name
                continue
            try:
                yield waited
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
            return
        finally:
            os.close(handle)
