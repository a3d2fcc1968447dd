"""Building the kernel: with which compiler, where it is kept, and that nobody else can plant one.

Compilers are small scripts and what they build are lines of text, which a loader of the tests takes for libraries.
"""

import ctypes
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import CPU, random_llama

from specctl.errors import UsageError
from specctl.models import backend
from specctl.models.kernel import folders, library
from specctl.models.kernel.decoder import why_not_kernel
from specctl.models.kernel.library import KernelUnavailable
from specctl.models.llama import Llama
from specctl.models.llama_decoder import LlamaDecoder

GOOD = 'echo "$0" >> "$LOG"; while [ "$1" != -o ]; do shift; done; echo "built by $0" > "$2"'
FAILS = 'echo "$0" >> "$LOG"; echo "In file included from here:" >&2; echo "error: no such flag" >&2; exit 1'
LIES = 'echo "$0" >> "$LOG"'


class Machine:
    """What a run finds: programs, a home, a folder for temporary files; and what it does with them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._log = patch, folder / "log"
        self.programs, self.cache, self.temporary = (folder / name for name in ("bin", "cache", "tmp"))
        for made in (self.programs, self.cache, self.temporary):
            made.mkdir()
        self.temporary.chmod(0o1777)
        self.noexec: list[Path] = []
        patch.setenv("PATH", str(self.programs))
        patch.setenv("XDG_CACHE_HOME", str(self.cache))
        patch.setenv("LOG", str(self._log))
        patch.delenv("CXX", raising=False)
        patch.setattr(tempfile, "tempdir", str(self.temporary))
        patch.setattr(library, "_loaded", [])
        types = {name: getattr(ctypes, name) for name in ("c_void_p", "c_int64")}
        patch.setattr(library, "ctypes", SimpleNamespace(CDLL=self._open, **types))

    @property
    def kept(self) -> Path:
        return self.cache / "specctl"

    @property
    def fallback(self) -> Path:
        return self.temporary / f"specctl-{os.getuid()}"

    def compiler(self, name: str, script: str = GOOD, version: str = "echo 1.0") -> Path:
        path = self.programs / name
        path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then {version}; exit $?; fi\n{script}\n')
        path.chmod(0o755)
        return path

    def name_by_cxx(self, name: object) -> None:
        self._patch.setenv("CXX", str(name))

    def run(self) -> tuple[str, list[str], list[str]]:
        """Load in a process of its own: who built it, the compilers that were run, what was told."""
        self._log.write_text("")
        library._loaded.clear()
        library._name.cache_clear()
        lines: list[str] = []
        found = library.load(lines.append)
        assert library.loaded() is found and library.is_built()
        return found.builder, [Path(line).name for line in self._log.read_text().split()], lines

    def _open(self, path: str) -> SimpleNamespace:
        text = Path(path).read_text()
        if any(folder in Path(path).parents for folder in self.noexec):
            raise OSError(f"{path}: failed to map segment from shared object")
        if not text.startswith("built by "):
            raise OSError(f"{path}: invalid ELF header")
        functions = {f"specctl_{name}": SimpleNamespace() for name in ("pass", "draw", "token_rule", "settle")}
        return SimpleNamespace(builder=Path(text.split()[-1]).name, **functions)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    library._name.cache_clear()
    yield Machine(tmp_path, monkeypatch)
    library._name.cache_clear()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def model() -> Llama:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    return random_llama(0, 0.2, vocab_size=7, head_dim=16, **sizes).float()


# ---- Compilers ----


def test_it_is_built_once_and_told(machine: Machine) -> None:
    machine.compiler("c++")
    lines: list[str] = []
    assert why_not_kernel(model().shape, torch.float32, CPU, lines.append) is None
    assert lines == ["building the kernel for this processor, once; it takes seconds"]
    (built,) = names(machine.kept)
    assert machine.run() == ("c++", [], []) and names(machine.kept) == [built] and not names(machine.temporary)
    library._loaded.clear()
    assert why_not_kernel(model().shape, torch.float32, CPU, lines.append) is None and len(lines) == 1


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"script": FAILS}, "c++ failed: error: no such flag"),
        ({"script": LIES}, "c++: it built nothing"),
        ({"script": 'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"'}, "invalid ELF header"),
        ({"version": "echo no licence; exit 1"}, "c++ failed: no licence"),
    ],
    ids=["fails", "lies", "rubbish", "no version"],
)
def test_a_broken_compiler_is_followed_by_the_next(machine: Machine, broken: dict[str, str], told: str) -> None:
    machine.compiler("c++", **broken)
    machine.compiler("g++", version="echo 2.0")
    machine.compiler("clang++")
    builder, _, (line,) = machine.run()
    assert builder == "g++" and line.startswith("while the kernel was built: ") and told in line and "\n" not in line
    assert machine.run() == ("g++", [], [])  # what was broken is not tried again


@pytest.mark.parametrize(
    ("scripts", "reason"),
    [
        ({}, "there is no C++ compiler; install g++ or clang++"),
        ({"c++": FAILS}, "c++ failed: error: no such flag"),
        (
            {"c++": FAILS, "g++": LIES},
            "c++ failed: error: no such flag; .* built with .*g++: it built nothing",
        ),
    ],
    ids=["none", "one", "two"],
)
def test_without_a_compiler_torch_runs_the_passes_and_it_is_said(
    machine: Machine, scripts: dict[str, str], reason: str
) -> None:
    for name, script in scripts.items():
        machine.compiler(name, script)
    lines: list[str] = []
    made = backend.decoder(model(), "target", dtype=torch.float32, device=CPU, narrate=lines.append)
    assert isinstance(made, LlamaDecoder)
    assert "target runs through torch's operators" in lines[-1] and "\n" not in lines[-1]
    with pytest.raises(UsageError, match=reason.replace("++", r"\+\+")):
        backend.decoder(model(), "target", dtype=torch.float32, device=CPU, kernel=True)
    assert not machine.kept.exists() or not names(machine.kept)


def test_what_cxx_names_comes_first_in_every_run(machine: Machine) -> None:
    machine.compiler("c++")
    assert machine.run()[0] == "c++"
    mine = machine.compiler("mine", FAILS, version="echo 3.0")
    machine.name_by_cxx(mine)
    for _ in range(2):  # it is not given up for what another has built, and that it failed is said
        builder, tried, (line,) = machine.run()
        assert (builder, tried) == ("c++", ["mine"]) and "mine failed: error: no such flag" in line
    machine.compiler("mine", version="echo 3.0")
    assert machine.run() == ("mine", ["mine"], []) and machine.run() == ("mine", [], [])
    machine.name_by_cxx("no-such-compiler")
    builder, _, (line,) = machine.run()
    assert builder == "c++" and "CXX names 'no-such-compiler', which is not a program here" in line


def test_each_processor_source_and_compiler_has_a_library_of_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(version: str = "echo 1.0") -> str:
        library._name.cache_clear()
        return library._name(str(machine.compiler("c++", version=version)))

    first = name()
    assert name() == first
    found = [first, name("echo 1.1")]
    for what, changed in (
        ("_processor", lambda: b"another"),
        ("_flags", lambda: ["-O0"]),
        ("_SOURCES", library._SOURCES[:1]),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(library, what, changed)
            found.append(name())
    assert len(set(found)) == 5 and name() == first


def test_a_processor_is_told_by_what_it_can_do_and_not_by_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def processor(**lines: str) -> bytes:
        info = {"model name": "A", "cpu MHz": "2000.1", "flags": "sse avx2", **lines}
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: "".join(f"{k}\t: {v}\n" for k, v in info.items()) * 2)
        return library._processor()

    assert processor() == processor(**{"cpu MHz": "3100.7"})
    assert len({processor(), processor(flags="sse avx2 avx512f"), processor(**{"model name": "B"})}) == 3


# ---- Where it is kept ----


def test_a_broken_library_is_built_again(machine: Machine) -> None:
    machine.compiler("c++")
    machine.run()
    (path,) = machine.kept.iterdir()
    path.write_text("cut")
    library._loaded.clear()
    assert not library.is_built() and machine.run() == ("c++", ["c++"], []) and names(machine.kept) == [path.name]


def test_without_a_home_it_is_kept_in_one_folder_of_the_users_own(machine: Machine) -> None:
    machine.cache.rmdir()
    machine.cache.write_text("a file, in which no folder can be made")
    machine.compiler("c++")
    builder, tried, (line,) = machine.run()
    assert (builder, tried) == ("c++", ["c++"]) and f"it cannot be kept in {machine.kept}: Not a directory" in line
    assert names(machine.temporary) == [machine.fallback.name] and len(names(machine.fallback)) == 1
    assert stat.S_IMODE(machine.fallback.stat().st_mode) == 0o700
    assert machine.run() == ("c++", [], []) and names(machine.temporary) == [machine.fallback.name]


def test_where_nothing_may_be_run_the_next_folder_is_tried_and_found_again(machine: Machine) -> None:
    machine.noexec.append(machine.cache)
    machine.compiler("c++")
    builder, tried, (line,) = machine.run()
    assert (builder, tried) == ("c++", ["c++"]) and "failed to map segment" in line
    assert names(machine.kept) == [] and len(names(machine.fallback)) == 1
    assert machine.run() == ("c++", [], [])
    machine.noexec.append(machine.temporary)
    machine.compiler("g++")
    with pytest.raises(KernelUnavailable) as told:
        machine.run()
    assert str(told.value).count("failed to map segment") == 4 and "\n" not in str(told.value)
    assert names(machine.kept) == [] and len(names(machine.fallback)) == 1


def linked(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)


PLANTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link": (linked, "it is a symbolic link"),
    "open to a group": (lambda folder: folder.chmod(0o770), "others may write to it"),
    "open to all": (lambda folder: folder.chmod(0o707), "others may write to it"),
    "replaceable": (lambda folder: folder.parent.chmod(0o777), "others may put another in its place"),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("place", ["kept", "fallback"])
def test_nothing_is_loaded_from_where_others_could_have_put_it(machine: Machine, plant: str, place: str) -> None:
    if place == "fallback":
        machine.noexec.append(machine.cache)
    machine.compiler("c++")
    machine.run()
    folder: Path = getattr(machine, place)
    (path,) = folder.iterdir()
    path.write_text("built by a stranger\n")
    assert machine.run()[0] == "stranger"  # or the test would see nothing
    change, reason = PLANTS[plant]
    change(folder)
    try:
        builder, tried, lines = machine.run()
    except KernelUnavailable as error:
        assert place == "fallback" and reason in str(error)
    else:
        assert place == "kept" and (builder, tried) == ("c++", ["c++"]) and reason in lines[0]
        assert len(names(machine.fallback)) == 1
    assert path.read_text() == "built by a stranger\n"


def test_a_folder_of_another_user_does_not_serve(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.compiler("c++")
    machine.run()
    monkeypatch.setattr(folders, "_user", lambda: os.getuid() + 1)
    with pytest.raises(KernelUnavailable, match=r"it belongs to another user.*it belongs to another user"):
        machine.run()


def test_what_two_processes_build_at_once_is_whole_at_any_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = str(machine.compiler("c++"))
    name, whole = library._name(compiler), shutil.copyfile

    def interrupted(source: Path, target: str) -> None:
        """Another process builds it from beginning to end while this one has written a half."""
        Path(target).write_text("built")
        assert library._kept([name]) is None
        monkeypatch.setattr(shutil, "copyfile", whole)
        assert library._build(compiler, name, []).builder == "c++"
        whole(source, target)
        inodes.append((machine.kept / name).stat().st_ino)

    inodes: list[int] = []
    monkeypatch.setattr(shutil, "copyfile", interrupted)
    assert library._build(compiler, name, []).builder == "c++"
    assert names(machine.kept) == [name]
    assert (machine.kept / name).stat().st_ino != inodes[0]  # what the other one runs from is not written over


def test_what_nobody_uses_any_more_is_removed(machine: Machine) -> None:
    machine.compiler("c++")
    machine.run()
    (used,) = machine.kept.iterdir()
    aged = {"pass-old.so": 100, "pass-recent.so": 10, "unfinished-killed.so": 1, "notes": 900}
    for name in (used.name, *aged):
        path = machine.kept / name
        path.touch()
        before = path.stat().st_mtime - aged.get(name, 100) * 86400
        os.utime(path, (before, before))
    (machine.kept / "unfinished-now.so").touch()
    assert machine.run() == ("c++", [], [])  # which is a use
    machine.compiler("c++", version="echo 2.0")
    machine.run()
    new = library._name(str(machine.programs / "c++"))
    assert names(machine.kept) == sorted([used.name, new, "pass-recent.so", "notes", "unfinished-now.so"])


def test_a_real_compiler_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_loaded", [])
    if reason := why_not_kernel(model().shape, torch.float32, CPU):
        pytest.skip(reason)
    assert len(names(tmp_path / "specctl")) == 1
