"""The file that a line of JSON is appended to for each prompt: one process writes it, and the next run goes on.

Beside it lies a recipe of all that decides its lines, so that lines of two configs are never mixed. What is no
regular file (a pipe, a terminal, /dev/stdout) takes lines and no more: it has no recipe, and nothing is gone on with.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from specctl import locks
from specctl.errors import SpecctlError, UsageError
from specctl.run_folder import differences, ensure_writable, read_object, to_text, write_json

SUMMED = ("num_new_tokens", "num_rounds", "num_drafted", "num_accepted", "seconds", "prompt_seconds")


class Output:
    """An open one. is_stream: whether it is no regular file."""

    def __init__(self, path: Path, file: BinaryIO, is_stream: bool) -> None:
        self.path, self.is_stream, self._file = path, is_stream, file

    def resume(self, wanted: dict[str, Any], ids: Iterable[str]) -> list[dict[str, Any]]:
        """The finished lines of a file that was made from the same recipe; none for a new or empty one, or a stream.

        ids: of the prompts. Raises UsageError for a file that was made otherwise, or changed.
        """
        path = self.path
        if self.is_stream:
            return []
        if path.stat().st_size == 0:
            write_json(recipe_path(path), wanted)
            return []
        if not recipe_path(path).is_file():
            raise UsageError(
                f"{path} is not of this command's making (it has no {recipe_path(path).name}); choose another"
            )
        changed = differences(read_object(recipe_path(path)), wanted)
        if changed:
            raise UsageError(f"{path} was made otherwise ({'; '.join(changed)}); choose another --output or remove it")
        whole, newline, _ = path.read_bytes().rpartition(b"\n")
        lines = _parse(path, whole, set(ids)) if newline else []
        self._file.truncate(len(whole) + len(newline))  # a last line without its end: the process died as it wrote it
        return lines

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; it is with the system when this returns."""
        self._file.write((to_text(line, indent=None) + "\n").encode("utf-8"))
        self._file.flush()


def recipe_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.recipe.json")


@contextlib.contextmanager
def open_output(path: Path) -> Iterator[Output]:
    """Open an output, before any other work, for this process alone; a new one that gets no line is removed again.

    Raises UsageError where no lines can be written there, SpecctlError where another process writes them.
    """
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:  # results name it, and JSON is UTF-8
        shown = str(path).encode("utf-8", "backslashreplace").decode("ascii", "replace")
        raise UsageError(f"--output {shown}: its name is not UTF-8; choose another --output") from None
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder; name a file")
    is_new, is_stream = not path.exists(), _is_stream(path)
    if is_new:
        ensure_writable(path.parent, advice="choose another --output")
    with contextlib.ExitStack() as stack:
        try:
            file = _opened(stack, path, is_stream)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another --output") from error
        try:
            yield Output(path, file, is_stream)
        finally:
            if is_new and locks.is_at(file.fileno(), path) and path.stat().st_size == 0:
                path.unlink()
                recipe_path(path).unlink(missing_ok=True)


def _opened(stack: contextlib.ExitStack, path: Path, is_stream: bool) -> BinaryIO:
    while True:
        file = stack.enter_context(open(path, "ab"))  # noqa: SIM115  # the stack closes it
        if is_stream:
            return file
        if not locks.take(file.fileno(), wait=False):
            raise SpecctlError(f"another specctl command is writing {path}; wait for it, or choose another file")
        if locks.is_at(file.fileno(), path):  # else whoever had it has removed it
            return file


def _is_stream(path: Path) -> bool:
    """Whether a path leads to no regular file, or to one by a name of a process's open files."""
    folder = os.path.realpath(path.parent)
    return path.exists() and (not path.is_file() or folder == "/dev" or folder.startswith("/proc/"))


def _parse(path: Path, text: bytes, ids: set[str]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(text.split(b"\n"), 1):
        try:
            fields = json.loads(line)
            ids.remove(fields["id"])
            if not isinstance(fields["category"], str | None):
                raise TypeError
            if not all(math.isfinite(fields["stats"][name]) and fields["stats"][name] >= 0 for name in SUMMED):
                raise ValueError
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise UsageError(f"{path}, line {number} was changed since it was written; repair or remove it") from None
        lines.append(fields)
    return lines
