"""Files are written whole or not at all, and every refusal names the file."""

from pathlib import Path

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
