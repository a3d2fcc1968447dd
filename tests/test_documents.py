"""Documents come in a fixed order, byte for byte, in bounded pieces; every refusal names file and place."""

import gzip
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specctl import documents as module
from specctl.config import CorpusConfig
from specctl.documents import read_documents
from specctl.errors import UsageError
from specctl.tokenizer import Tokenizer


def texts(config: CorpusConfig) -> list[str]:
    return ["".join(piece for piece, _ in document.pieces()) for document in read_documents(config)]


def read(*paths: Path | str, text_field: str = "text") -> list[str]:
    return texts(CorpusConfig(paths=tuple(map(str, paths)), text_field=text_field))


def refusal(*paths: Path | str, text_field: str = "text") -> str:
    with pytest.raises(UsageError) as caught:
        read(*paths, text_field=text_field)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mes données é"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "b.md").write_bytes(b"B")
    (folder / "a.txt").write_bytes(b"A")
    (folder / "sub" / "c.py").write_bytes(b"C")
    (folder / "sub" / "d.jsonl").write_bytes(b'{"text": "D"}\n{"text": "E"}')
    (folder / "empty.rst").write_bytes(b"")
    (folder / "data.bin").write_bytes(b"\xff")
    (folder / ".git" / "hidden.txt").write_bytes(b"hidden")
    (folder / ".hidden.txt").write_bytes(b"hidden")
    (tmp_path / "given.log").write_bytes(b"G")
    return folder


def test_files_and_folders_in_order(folder: Path) -> None:
    assert read(folder.parent / "given.log", folder, folder / "a.txt") == ["G", "A", "B", "C", "D", "E"]


def test_a_file_counts_once_whatever_it_is_called(folder: Path) -> None:
    (folder / "link.txt").symlink_to(folder / "b.md")
    (folder.parent / "other").symlink_to(folder)
    assert read(folder, folder.parent / "other", folder / "*.md", folder / "sub" / ".." / "a.txt") == list("ABCDE")
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    assert read(folder) == list("ABCDE")
    assert "broken.txt is not a file" in refusal(folder / "*.txt")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.md", ["B"]),
        ("**/*.py", ["C"]),
        ("**/*.[mp][dy]", ["B", "C"]),
        ("*", ["A", "B", "C", "D", "E"]),  # a folder that matches is read as a folder
    ],
)
def test_patterns(folder: Path, pattern: str, found: list[str]) -> None:
    if pattern == "*":
        (folder / "data.bin").unlink()  # or the pattern would ask for it too
    assert read(folder / pattern) == found


def test_a_name_that_looks_like_a_pattern_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_bytes(b"one")
    assert read(tmp_path / "a[1].txt") == ["one"]


def test_home_and_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert read("~/mes données é/**/*.py") == ["C"]
    monkeypatch.chdir(folder)
    assert read("sub/c.py") == read("./sub/../s*/c.py") == ["C"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert "corpus path" in refusal(tmp_path / "nowhere") and "nowhere does not exist" in refusal(tmp_path / "nowhere")
    assert str(tmp_path) in refusal(tmp_path / "nowhere")
    (tmp_path / "picture.png").write_bytes(b"")
    assert f"folder {tmp_path} holds no text files" in refusal(tmp_path)
    assert f"pattern {tmp_path}/**/*.md matches no text file" in refusal(tmp_path / "**" / "*.md")
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is not a file or folder that can be read" in refusal(tmp_path / "pipe")


def test_an_unreadable_file_and_folder_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(module, "open", refuse, raising=False)
    assert refusal(folder / "a.txt") == f"cannot read {folder / 'a.txt'}: Permission denied"
    monkeypatch.setattr("os.scandir", refuse)
    assert refusal(folder) == f"cannot read folder {folder}: Permission denied"


# Bytes


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n caf\xc3\xa9")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "o\\r\\nne"}\r\n\r\n  \n{"text": ""}\r\n{"text": "two"}')
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbf")
    assert read(tmp_path) == ["one\r\ntwo\rthree\n café", "o\r\nne", "two"]


@pytest.mark.parametrize("chunk_bytes", [3, 4, 1000])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(("bad", "byte"), [(b"\xe9!", "0xe9"), (b"\xc3", "0xc3"), (b"\xf0\x9f\x92", "0xf0")])
def test_bad_byte_names_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: bytes, bad: bytes, byte: str, chunk_bytes: int
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    (tmp_path / "bad é.txt").write_bytes(mark + b"caf\xc3\xa9 " + bad)
    message = refusal(tmp_path)
    assert f"bad é.txt is not UTF-8: bad byte {byte} at byte offset {len(mark) + 6};" in message


def test_bad_byte_of_json_lines_counts_from_the_start_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "one"}\n{"text": "\xff"}\n')
    assert "bad.jsonl is not UTF-8: bad byte 0xff at byte offset 26;" in refusal(tmp_path / "bad.jsonl")


def test_packed_and_binary_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"some text"))
    (tmp_path / "wide.txt").write_bytes("some text".encode("utf-16"))
    assert "text.gz is not UTF-8: bad byte 0x8b at byte offset 1; convert or unpack" in refusal(tmp_path / "text.gz")
    assert "wide.txt is not UTF-8: bad byte 0xff at byte offset 0;" in refusal(tmp_path / "wide.txt")


def test_the_locale_changes_nothing(folder: Path) -> None:
    (folder / "é.jsonl").write_bytes('{"text": "日本 👩"}'.encode())
    script = (
        "import sys; from specctl.corpus import *; "
        "print(survey(CorpusConfig(paths=(sys.argv[1],), validation_fraction=0.5)).fingerprint)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script, str(folder)],
            env=os.environ | {"LC_ALL": locale, "LANG": locale},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for locale in ("C", "C.UTF-8")
    }
    assert len(found) == 1 and re.fullmatch(r"[0-9a-f]{16}\n", found.pop())


# JSON lines


def test_json_lines_read_the_field_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.JSONL").write_bytes(b'{"text": 1, "body": "B", "x": {"body": "no"}}\n\n{"body": "\\u00e9\xc3\xa9"}')
    assert read(tmp_path, text_field="body") == ["B", "éé"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": "cut', "line 3 is not JSON"),
        (b"plain", "line 3 is not JSON"),
        (b"[" * 100_000, "line 3 is not JSON"),
        (b'["text"]', "line 3 is not a JSON object"),
        (b'"text"', "line 3 is not a JSON object"),
        (b'{"txt": "x"}', "line 3 has no field 'text'; did you mean 'txt'?"),
        (b'{"body": "x", "id": 1}', "line 3 has no field 'text'; known are body, id; set the corpus's text_field"),
        (b"{}", "line 3 has no field 'text'"),
        (b'{"text": null}', "line 3: the field 'text' is not a string"),
        (b'{"text": ["x"]}', "line 3: the field 'text' is not a string"),
        (b'{"text": "a\\ud83d"}', r"line 3: the field 'text' holds half a character (\ud83d)"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, expected: str) -> None:
    path = tmp_path / "données.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    assert f"{path}, {expected}" in refusal(tmp_path)


def test_a_line_that_memory_should_not_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_BYTES", 21)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "12345678"}\n{"text": "1234567890"}')
    assert "a.jsonl, line 2 is longer than 21 bytes" in refusal(tmp_path)


# Pieces


@pytest.mark.parametrize("name", ["long.txt", "long.jsonl"])
def test_pieces_are_bounded_and_joined_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(module, "BORDER_CHARACTERS", 40)
    for text in ("x" * 1001, " " * 300, "日本語" * 100, "a b\n\n c" * 100, "x" * 50, "x" * 51):
        data = text if name == "long.txt" else f'{{"text": {text!r}}}'.replace("'", '"')
        (tmp_path / name).write_text(data, encoding="utf-8")
        (document,) = read_documents(CorpusConfig(paths=(str(tmp_path / name),)))
        pieces = list(document.pieces())
        assert "".join(piece for piece, _ in pieces) == text
        assert all(0 < len(piece) <= 50 for piece, _ in pieces)
        assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
        assert document.measure()[1] == len(text)


@pytest.mark.parametrize("seed", range(30))
def test_tokens_of_the_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    words = ["it's", "été", "a.b(c)", "123", "日本", "\x1c", "!!", "\xa0x", "don't", "'s", "👩‍👩‍👧", "we'll"]
    blanks = (
        [" "] * 3 + ["\n", "\r\n", "\n\n", "  ", "\n    ", "\t", " \n", "\n\n\n  "]
        if seed % 2
        else ["\n", "\n\n", "\t"]
    )
    text = "".join(rng.choice(words) + rng.choice(blanks) for _ in range(500))
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 60)
    monkeypatch.setattr(module, "BORDER_CHARACTERS", 50)
    tokenizer = Tokenizer.train([text], 400)
    pieces = [piece for piece, _ in module._in_memory(text).pieces()]
    assert len(pieces) > 20
    assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)
    assert Tokenizer.train(pieces, 400).fingerprint() == tokenizer.fingerprint()


# Built-in text


def test_builtin_stdlib_is_code_without_tests_or_tables() -> None:
    documents = texts(CorpusConfig(builtin="python-stdlib"))
    assert 5e6 < sum(map(len, documents)) < 15e6
    assert documents == texts(CorpusConfig(builtin="python-stdlib"))
    text = "".join(documents)
    assert "class JSONEncoder" in text
    assert "decoding_table = (" not in text and "site-packages/pip" not in documents[0]


def test_builtin_docs_is_prose() -> None:
    documents = texts(CorpusConfig(builtin="python-docs"))
    assert 4e5 < sum(map(len, documents)) < 3e6
    assert any("assert" in document for document in documents)
