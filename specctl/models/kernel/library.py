"""Builds `pass.cpp` for this processor, once, and loads it.

The built library is kept under a name that its source, the compiler and the processor decide, so a change to any of
them builds another; `folders.py` says where. What `CXX` names is tried first, then the usual compilers in turn. Says
what is missing where it cannot be had. Knows nothing about models.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from specctl.errors import SpecctlError
from specctl.models.kernel import folders

_SOURCES = ("pass.cpp", "pool.h")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC", "-pthread")
_LONGEST_BUILD = 300  # seconds
_loaded: list[ctypes.CDLL] = []  # the library, once it is


class KernelUnavailable(SpecctlError):
    """Why there is no kernel on this machine."""


def load(narrate: Callable[[str], None] = lambda line: None) -> ctypes.CDLL:
    """The library, built first if it is not, which takes seconds.

    narrate: called with a line for each thing that was tried in vain before it was built. Raises KernelUnavailable.
    """
    if not _loaded:
        failures: list[str] = []
        library = _find_or_build(failures)
        if library is None:
            raise KernelUnavailable("; ".join(failures))
        for line in failures:
            narrate(f"while the kernel was built: {line}")
        _loaded.append(_declared(library))
    return _loaded[0]


def loaded() -> ctypes.CDLL | None:
    """The library, if something has loaded it; nothing is built."""
    return _loaded[0] if _loaded else None


def is_built() -> bool:
    """Whether `load` has nothing to build. Raises KernelUnavailable where there is no compiler."""
    if _loaded:
        return True
    failures: list[str] = []
    for compilers in _compilers():
        if names := _names(compilers, failures):
            return _kept(names.values()) is not None
    raise KernelUnavailable("; ".join(failures))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.specctl_pass.argtypes = [ctypes.c_void_p] * 2
    library.specctl_draw.argtypes = [ctypes.c_void_p] * 3
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.specctl_token_rule.argtypes = (*[pointer] * 2, integer, *[pointer] * 2, *[integer] * 2, *[pointer] * 3)
    library.specctl_settle.argtypes, library.specctl_settle.restype = (), None
    for function in (library.specctl_pass, library.specctl_draw, library.specctl_token_rule):
        function.restype = ctypes.c_int64
    return library


def _find_or_build(failures: list[str]) -> ctypes.CDLL | None:
    """What is kept or else is built. Where a compiler was named, no other one's library is looked for before it failed.

    failures: gets a line for each thing that was tried in vain.
    """
    for compilers in _compilers():
        failed: list[str] = []
        names = _names(compilers, failed)
        if library := _kept(names.values()):
            return library
        failures += failed
        for compiler, name in names.items():
            try:
                return _build(compiler, name, failures)
            except subprocess.CalledProcessError as error:
                failures.append(f"{compiler} failed: {_told(error)}")
            except (OSError, subprocess.TimeoutExpired) as error:
                failures.append(f"it could not be built with {compiler}: {error}")
    return None


def _compilers() -> Iterator[tuple[str, ...]]:
    """The one that CXX names, alone, then the others."""
    if wanted := os.environ.get("CXX"):
        yield (wanted,)
    yield _COMPILERS


def _names(compilers: tuple[str, ...], failures: list[str]) -> dict[str, str]:
    """Those of the compilers that are here, by path, with the name of the library that each builds."""
    paths = [path for name in compilers if (path := shutil.which(name))]
    if not paths and compilers == _COMPILERS:
        failures.append("there is no C++ compiler; install g++ or clang++")
    elif not paths:
        failures.append(f"CXX names {compilers[0]!r}, which is not a program here; name one without arguments")
    names = {}
    for path in paths:
        try:
            names[path] = _name(path)
        except subprocess.CalledProcessError as error:
            failures.append(f"{path} failed: {_told(error)}")
        except (OSError, subprocess.TimeoutExpired) as error:
            failures.append(f"{path} cannot be run: {error}")
    return names


def _told(error: subprocess.CalledProcessError) -> str:
    """The line of what a compiler said that tells the most."""
    lines = error.output.decode(errors="replace").strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else str(error))


@cache
def _name(compiler: str) -> str:
    """What the library for this source, compiler and processor is called."""
    source = [(Path(__file__).parent / name).read_bytes() for name in _SOURCES]
    version = subprocess.check_output([compiler, "--version"], stderr=subprocess.STDOUT, timeout=60)
    parts = [*source, version, " ".join(_flags()).encode(), _processor()]
    return f"pass-{hashlib.sha256(bytes(1).join(parts)).hexdigest()[:16]}.so"


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


def _kept(names: Iterable[str]) -> ctypes.CDLL | None:
    """The first library that is built, lies in a folder of the user's own, and can be loaded."""
    safe = [folder for folder in folders.places() if folders.why_not(folder) is None]
    for path in (folder / name for name in names for folder in safe):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # not there, or broken, or where nothing may be run
            continue
        folders.mark_used(path)
        return library
    return None


def _build(compiler: str, name: str, failures: list[str]) -> ctypes.CDLL:
    """Build the library and keep it in the first folder from which it can be loaded.

    failures: gets a line for each folder that does not serve. Raises OSError where none does.
    """
    with tempfile.TemporaryDirectory(prefix="specctl-build-") as folder:
        built = Path(folder) / name
        source = str(Path(__file__).parent / _SOURCES[0])
        command = [compiler, *_flags(), source, "-o", str(built)]
        subprocess.check_output(command, stderr=subprocess.STDOUT, timeout=_LONGEST_BUILD)
        if not built.is_file():
            raise OSError("it built nothing")
        refused: list[str] = []
        for place in folders.places():
            reason = folders.why_not_made(place)
            if reason is None:
                try:
                    library = _keep(built, place / name)
                except OSError as error:  # no room, or nothing there may be run
                    reason = str(error)
                else:
                    failures += refused
                    folders.clear(place, "pass-*.so")
                    return library
            refused.append(f"it cannot be kept in {place}: {reason}")
        raise OSError("; ".join(refused))


def _keep(built: Path, path: Path) -> ctypes.CDLL:
    """Copy a library to where it is kept, whole or not at all, and load it from there. Raises OSError."""
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=folders.UNFINISHED, suffix=".so")
    os.close(handle)
    try:
        shutil.copyfile(built, unfinished)
        ctypes.CDLL(unfinished)  # or an OSError that says what is wrong with it, or with the folder
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return ctypes.CDLL(str(path))
