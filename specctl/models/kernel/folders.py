"""Folders in which a built library may lie, so that what is loaded from there is the user's own.

Code is loaded from them: a folder counts only where nobody else can have put anything into it. Knows nothing about
what is kept there, but that files which nobody has used for long are let go.
"""

import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_UNUSED_DAYS = 90
_ABANDONED_HOURS = 1  # longer than any build takes
UNFINISHED = "unfinished-"  # how the name of a file that is being written begins


def places() -> list[Path]:
    """The user's cache folder and, where that does not serve, one in the temporary folder, the same in every run."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [Path(home) / "specctl", Path(tempfile.gettempdir()) / f"specctl-{_user()}"]


def why_not(folder: Path) -> str | None:
    """Why nothing may be loaded from a folder, or None where all in it is the user's own."""
    try:
        found, above = os.lstat(folder), os.stat(folder.parent)
    except OSError as error:
        return str(error.strerror)
    if not stat.S_ISDIR(found.st_mode):
        return "it is a symbolic link" if stat.S_ISLNK(found.st_mode) else "it is not a folder"
    if found.st_uid != _user():
        return "it belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        return "others may put another in its place"
    return None


def why_not_made(folder: Path) -> str | None:
    """Make a folder if it is not there; as `why_not` then."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return why_not(folder) or str(error.strerror)
    return why_not(folder)


def mark_used(path: Path) -> None:
    with suppress(OSError):  # in a folder that can only be read
        os.utime(path)


def clear(folder: Path, pattern: str) -> None:
    """Remove what matches the pattern and has not been used for months, and what a stopped build left."""
    now = time.time()
    for each, seconds in ((pattern, _UNUSED_DAYS * 86400), (f"{UNFINISHED}*", _ABANDONED_HOURS * 3600)):
        for path in folder.glob(each):
            with suppress(OSError):  # another process was faster
                if now - path.lstat().st_mtime > seconds:
                    path.unlink()


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
