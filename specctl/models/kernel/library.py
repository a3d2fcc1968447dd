"""Builds `pass.cpp` for this processor, once, and loads it.

The built library is kept in the user's cache folder under a name that its source, the compiler and the
processor decide, so a change to any of them builds another. Needs g++ or clang++; says what is missing
where it cannot be had. Knows nothing about models.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from specctl.errors import SpecctlError

_SOURCES = ("pass.cpp", "pool.h")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC", "-pthread")
_LONGEST_BUILD = 300  # seconds


class KernelUnavailable(SpecctlError):
    """Why there is no kernel on this machine."""


@cache
def load() -> ctypes.CDLL:
    """The library, built first if it is not, which takes seconds. Raises KernelUnavailable."""
    compiler = _compiler()
    with _told_as_unavailable(compiler):
        path = _path(compiler)
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # not there, or broken
            _build(compiler, path)
            library = ctypes.CDLL(str(path))
    library.specctl_pass.argtypes = [ctypes.c_void_p] * 2
    library.specctl_draw.argtypes = [ctypes.c_void_p] * 3
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.specctl_token_rule.argtypes = (*[pointer] * 2, integer, *[pointer] * 2, *[integer] * 2, *[pointer] * 3)
    library.specctl_settle.argtypes, library.specctl_settle.restype = (), None
    for function in (library.specctl_pass, library.specctl_draw, library.specctl_token_rule):
        function.restype = ctypes.c_int64
    return library


def loaded() -> ctypes.CDLL | None:
    """The library, if something has loaded it; nothing is built."""
    return load() if load.cache_info().currsize else None


def is_built() -> bool:
    """Whether `load` has nothing to build. Raises KernelUnavailable."""
    compiler = _compiler()
    with _told_as_unavailable(compiler):
        return _path(compiler).is_file()


@contextmanager
def _told_as_unavailable(compiler: str) -> Iterator[None]:
    try:
        yield
    except subprocess.CalledProcessError as error:
        told = error.output.decode(errors="replace").strip().splitlines()
        raise KernelUnavailable(f"{compiler} failed: {told[0] if told else error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"it could not be built with {compiler}: {error}") from error


@cache
def _path(compiler: str) -> Path:
    """Where the library for this source, compiler and processor lies, or will."""
    source = [(Path(__file__).parent / name).read_bytes() for name in _SOURCES]
    version = subprocess.check_output([compiler, "--version"], stderr=subprocess.STDOUT, timeout=60)
    parts = [*source, version, " ".join(_flags()).encode(), _processor()]
    return _folder() / f"pass-{hashlib.sha256(bytes(1).join(parts)).hexdigest()[:16]}.so"


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        if found := shutil.which(name):
            return found
    if wanted:
        raise KernelUnavailable(f"CXX names {wanted!r}, which is not a program here; name one without arguments")
    raise KernelUnavailable("there is no C++ compiler; install g++ or clang++")


def _flags() -> list[str]:
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return [*_FLAGS, "-march=native" if is_x86 else "-mcpu=native"]


def _processor() -> bytes:
    """What decides which instructions there are: another processor, on a shared home folder, builds its own."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    telling = ("flags", "Features", "model name", "CPU part")
    return "\n".join([sys.platform, platform.machine(), *sorted({x for x in lines if x.startswith(telling)})]).encode()


def _folder() -> Path:
    """Where built libraries are kept: the user's cache folder or, where that cannot be written, a new temporary one."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(home) / "specctl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="specctl-"))


def _build(compiler: str, path: Path) -> None:
    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        source = str(Path(__file__).parent / _SOURCES[0])
        command = [compiler, *_flags(), source, "-o", unfinished]
        subprocess.check_output(command, stderr=subprocess.STDOUT, timeout=_LONGEST_BUILD)
        ctypes.CDLL(unfinished)  # or an OSError that says what is wrong with it
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
