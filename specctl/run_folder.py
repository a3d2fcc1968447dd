"""Where a run's files lie: atomic writes, JSON, fingerprints.

Every write goes to a temporary file in the same folder and is renamed once it is on disk, so that a
reader sees the old file or the new one; it is done once the new name is on disk too. Knows nothing
about models, text or configs.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from specctl import locks
from specctl.errors import SpecctlError, UsageError


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` when the block ends well, and vanishes when it does not.

    Raises SpecctlError, naming the path and the cause, where the disk refuses: what stood there stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_names(path.parent)
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sync_names(folder: Path) -> None:
    """Have what was renamed in a folder on disk, or a loss of power may bring the old names back."""
    if os.name == "nt":  # which opens no folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # what file systems say that cannot
            raise
    finally:
        os.close(handle)


def _refused(path: Path, error: OSError) -> SpecctlError:
    advice = "; free some space and run it again" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
    return SpecctlError(f"cannot write {path}: {error.strerror or error}{advice}")


def remove(path: Path) -> None:
    """Remove a file, if it is there, and what killed writes of it left beside it."""
    for file in (path, *path.parent.glob(f".{path.name}.*.tmp")):
        file.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all; SpecctlError where the disk refuses."""
    with atomic_writer(path) as file:
        file.write(data)


def to_text(value: Any, indent: int | None = 2) -> str:
    """A value as JSON, indented for people to read or, for None, on one line: what all JSON is written with.

    A figure that is infinite or not a number is null there: JSON has no word for it, and strict readers refuse the
    ones that Python would write.
    """
    return json.dumps(_without_infinities(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON for people to read: indented, UTF-8, ending in a newline."""
    write_atomic(path, (to_text(value) + "\n").encode("utf-8"))


def read_json(path: Path) -> Any:
    """Read a JSON file; UsageError, naming the file, where it is missing or broken."""
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # broken JSON or broken UTF-8
        raise UsageError(f"{path} is not valid JSON ({error}): it may be truncated or not a JSON file") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that this program wrote; UsageError where it is missing, broken or not an object any more."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object: it was changed since it was written; remove it")
    return value


def fingerprint(value: Any) -> str:
    """Return 16 hex digits that depend on the content of a JSON value, not on the order of its keys."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:16]


def ensure_writable(folder: Path, advice: str = "choose another run_dir") -> None:
    """Make `folder` and prove, by writing, that files can be made in it; UsageError naming it if not."""
    probe = folder / f".probe.{secrets.token_hex(4)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UsageError(f"cannot write in folder {folder}: {error.strerror or error}; {advice}") from error


RECIPE = "recipe.json"


@contextlib.contextmanager
def replacing(folder: Path, recipe: dict[str, Any], *, keep_previous: bool = False) -> Iterator[Path]:
    """Yield an empty folder that takes `folder`'s place, recipe and all, when the block ends well.

    With `keep_previous` the folder that stood there becomes `NAME.previous`, else it is removed; of a link to a
    folder that is the link, and what it leads to is left alone. A process killed at any moment leaves the old folder
    or the new one, never a mixture; killed between the two renames, the new one, whose second rename `read_recipe`
    then makes.
    """
    with _alone_in(folder.parent):
        yield from _replace(folder, recipe, keep_previous)


def _replace(folder: Path, recipe: dict[str, Any], keep_previous: bool) -> Iterator[Path]:
    new, old = _new(folder), folder.with_name(f"{folder.name}.previous" if keep_previous else f".{folder.name}.old")
    _remove_folder(new)
    try:
        new.mkdir(parents=True)
        yield new
        write_json(new / RECIPE, recipe)
        if os.path.lexists(folder):
            _remove_folder(old)
            folder.rename(old)
        new.rename(folder)
        _sync_names(folder.parent)
    except OSError as error:
        raise _refused(folder, error) from error
    finally:
        _remove_folder(new)
    _remove_folder(folder.with_name(f".{folder.name}.old"))


def _remove_folder(folder: Path) -> None:
    """As far as that can be done; of a link the link alone."""
    with contextlib.suppress(OSError):
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def refuse_fixed(folder: Path) -> None:
    """Raise UsageError for a folder that `replacing` could not rename, before anything is made for it."""
    if folder.is_mount():
        raise UsageError(f"{folder} is a mount point and cannot be replaced; mount the run folder instead")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process renames in here, and keep the others waiting."""
    if os.name == "nt":  # which opens no folders
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        locks.take(handle)
        yield
    finally:
        os.close(handle)


def _new(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.new")


def read_recipe(folder: Path) -> dict[str, Any] | None:
    """What `folder` was made from, None where nothing whole lies there."""
    found = _recipe_in(folder)
    if found is not None:
        return found
    if _is_whole(_new(folder)):
        with _alone_in(folder.parent):  # or whoever is just about to rename it would find it gone
            if not folder.exists() and _is_whole(_new(folder)):
                _new(folder).rename(folder)
                _sync_names(folder.parent)
    return _recipe_in(folder)


def _recipe_in(folder: Path) -> dict[str, Any] | None:
    path = folder / RECIPE
    try:
        return read_object(path) if path.is_file() else None
    except UsageError:
        if path.is_file():
            raise
        return None  # it was being replaced


def _is_whole(new: Path) -> bool:
    return (new / RECIPE).is_file()  # it is written last


def differences(found: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> list[str]:
    """One phrase for each field that differs, such as "training.steps was 100, is 200"."""
    wanted = json.loads(json.dumps(wanted))  # tuples become lists, as they did on disk
    phrases: list[str] = []
    for key in sorted({*found, *wanted}):
        before, after = found.get(key), wanted.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            phrases += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            phrases.append(f"{prefix}{key} was {_short(before)}, is {_short(after)}")
    return phrases


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else f"{text[:8]}..."
