"""Files are written whole or not at all, and every refusal names the file."""

from pathlib import Path

import pytest

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
