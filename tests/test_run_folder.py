"""Files are written whole or not at all, and every refusal names the file."""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from specctl import run_folder
from specctl.errors import SpecctlError, UsageError
from specctl.run_folder import atomic_writer, ensure_writable, fingerprint, read_json, write_atomic, write_json


def test_json_round_trip_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "é.json"
    write_json(path, {"b": [1, 2.5, None], "a": "é"})
    assert read_json(path) == {"b": [1, 2.5, None], "a": "é"}
    text = path.read_text(encoding="utf-8")
    assert text.endswith("}\n") and "é" in text
    assert [file.name for file in path.parent.iterdir()] == ["é.json"]


def test_write_replaces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old, and longer")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with pytest.raises(KeyboardInterrupt), atomic_writer(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is done on disk, in order: what was synchronised, as (its inode, its size if it is a file), and renames."""
    done: list[object] = []
    sync, renames = os.fsync, {name: getattr(os, name) for name in ("rename", "replace")}

    def syncing(handle: int) -> None:
        found = os.fstat(handle)
        done.append((found.st_ino, None if stat.S_ISDIR(found.st_mode) else found.st_size))
        sync(handle)

    def renaming(name: str) -> Callable[..., None]:
        def rename(*places: Any, **options: Any) -> None:
            done.append("rename")
            renames[name](*places, **options)

        return rename

    monkeypatch.setattr(os, "fsync", syncing)
    for name in renames:
        monkeypatch.setattr(os, name, renaming(name))
    return done


def test_a_file_is_on_disk_before_its_name_and_its_name_before_the_write_is_done(
    tmp_path: Path, steps: list[object]
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"new")
    assert steps == [(path.stat().st_ino, 3), "rename", (tmp_path.stat().st_ino, None)]


def test_a_folder_is_on_disk_before_its_name_and_its_name_before_the_replacement_is_done(
    tmp_path: Path, steps: list[object]
) -> None:
    folder = tmp_path / "thing"
    for version in range(2):
        steps.clear()
        with run_folder.replacing(folder, {"version": version}) as new:
            write_atomic(new / "file", b"new")
        inner, outer = (folder.stat().st_ino, None), (tmp_path.stat().st_ino, None)
        files = [
            step
            for name in ("file", run_folder.RECIPE)
            for step in (((folder / name).stat().st_ino, (folder / name).stat().st_size), "rename", inner)
        ]
        assert steps == [*files, *["rename"] * (1 + version), outer]


@pytest.mark.parametrize(("number", "is_refused"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_synchronise_folders_may_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_refused: bool
) -> None:
    def refusing(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refusing)
    with pytest.raises(SpecctlError, match=r"cannot write .*file: ") if is_refused else nullcontext():
        write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_refused_write_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / "file" / "below.json"
    with pytest.raises(SpecctlError, match=r"below.json"):
        write_atomic(path, b"")
    with pytest.raises(UsageError, match=r"file"):
        ensure_writable(tmp_path / "file" / "folder")


def test_ensure_writable_makes_the_folder_and_leaves_it_empty(tmp_path: Path) -> None:
    ensure_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("content", [None, b"", b'{"a": ', b'"\xff"'])
def test_broken_json_names_the_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"config.json"):
        read_json(path)


def test_fingerprint_depends_on_content_alone() -> None:
    assert fingerprint({"a": 1, "b": (2, "é")}) == fingerprint({"b": [2, "é"], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert len(fingerprint(None)) == 16


def test_a_failed_replacement_keeps_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "thing"
    with run_folder.replacing(folder, {"version": 1}) as new:
        (new / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt), run_folder.replacing(folder, {"version": 2}) as new:
        (new / "file").write_text("half")
        raise KeyboardInterrupt
    assert run_folder.read_recipe(folder) == {"version": 1}
    assert (folder / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]
    with run_folder.replacing(folder, {"version": 3}, keep_previous=True) as new:
        assert list(new.iterdir()) == []
        (new / "file").write_text("new")
    assert run_folder.read_recipe(folder) == {"version": 3}
    assert run_folder.read_recipe(tmp_path / "thing.previous") == {"version": 1}


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    refused = pytest.raises(SpecctlError, match=r"cannot write .*thing: No space left")
    with refused, run_folder.replacing(tmp_path / "thing", {}):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_process_killed_between_the_two_renames_is_finished_by_the_next_reader(tmp_path: Path) -> None:
    folder, new = tmp_path / "thing", tmp_path / ".thing.new"
    write_json(new / "recipe.json", {"version": 2})
    assert run_folder.read_recipe(folder) == {"version": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]
    write_json(new / "recipe.json", {"version": 3})
    assert run_folder.read_recipe(folder) == {"version": 2}, "only what is missing is taken from there"


def test_without_keep_previous_an_earlier_previous_stays(tmp_path: Path) -> None:
    folder = tmp_path / "thing"
    for version, keep in enumerate((False, True, False)):
        with run_folder.replacing(folder, {"version": version}, keep_previous=keep):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "thing.previous"]
    assert run_folder.read_recipe(folder) == {"version": 2}
    assert run_folder.read_recipe(tmp_path / "thing.previous") == {"version": 0}


def test_remove_takes_the_rest_of_killed_writes_with_it(tmp_path: Path) -> None:
    for name in ("state", ".state.0f.tmp", ".state.ff.tmp", ".other.ff.tmp"):
        (tmp_path / name).write_bytes(b"")
    run_folder.remove(tmp_path / "state")
    run_folder.remove(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == [".other.ff.tmp"]


def test_a_reader_that_comes_between_the_last_two_steps_of_a_first_write_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader in the moment when the new folder is whole and has not yet its name."""
    folder, found = tmp_path / "thing", list[dict[str, Any] | None]()
    readers: list[Thread] = []
    rename = Path.rename

    def slowly(self: Path, target: Path) -> Path:
        if self.name == ".thing.new" and not readers:
            readers.append(Thread(target=lambda: found.append(run_folder.read_recipe(folder))))
            readers[0].start()
            readers[0].join(0.5)  # one that waits for no lock is done by then
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", slowly)
    with run_folder.replacing(folder, {"version": 1}):
        pass
    readers[0].join(60)
    assert found == [{"version": 1}] and [path.name for path in tmp_path.iterdir()] == ["thing"]


@pytest.mark.parametrize("keep_previous", [True, False])
def test_a_link_is_replaced_again_and_again_and_what_it_leads_to_is_left_alone(
    tmp_path: Path, keep_previous: bool
) -> None:
    away, folder = tmp_path / "away", tmp_path / "run" / "thing"
    write_json(away / "recipe.json", {"version": -1})
    folder.parent.mkdir()
    folder.symlink_to(away)
    for version in range(3):
        with run_folder.replacing(folder, {"version": version}, keep_previous=keep_previous):
            pass
        assert run_folder.read_recipe(folder) == {"version": version}
        previous = run_folder.read_recipe(folder.with_name("thing.previous"))
        assert previous == ({"version": version - 1} if keep_previous else None)
    assert run_folder.read_recipe(away) == {"version": -1}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["thing", "thing.previous"][: 1 + keep_previous]


def test_a_link_that_leads_nowhere_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "thing").symlink_to(tmp_path / "gone")
    with run_folder.replacing(tmp_path / "thing", {"version": 1}):
        pass
    assert run_folder.read_recipe(tmp_path / "thing") == {"version": 1}


def test_a_mount_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder.refuse_fixed(tmp_path)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(UsageError, match="is a mount point"):
        run_folder.refuse_fixed(tmp_path)
