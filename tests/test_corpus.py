"""Documents come in a fixed order, byte for byte; every refusal names the file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specctl.corpus import fingerprint_documents, load_token_ids, read_documents, split_documents, write_token_ids
from specctl.errors import UsageError
from specctl.tokenizer import Tokenizer


def read(*paths: Path) -> list[str]:
    return read_documents(builtin=None, paths=[str(path) for path in paths])


def test_files_and_folders_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "mes données é"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "b.md").write_bytes(b"B")
    (folder / "a.txt").write_bytes(b"A")
    (folder / "sub" / "c.py").write_bytes(b"C")
    (folder / "empty.rst").write_bytes(b"")
    (folder / "data.bin").write_bytes(b"\xff")
    (folder / ".git" / "hidden.txt").write_bytes(b"hidden")
    (tmp_path / "given.log").write_bytes(b"G")
    assert read(tmp_path / "given.log", folder, folder / "a.txt") == ["G", "A", "B", "C"]


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n caf\xc3\xa9")
    assert read(tmp_path) == ["one\r\ntwo\rthree\n café"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bad_byte_names_file_and_offset(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "bad é.txt").write_bytes(mark + b"caf\xc3\xa9 \xe9!")
    with pytest.raises(UsageError, match=f"bad é.txt.*0xe9.*offset {len(mark) + 6};"):
        read(tmp_path)


def test_missing_and_textless_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere"):
        read(tmp_path / "nowhere")
    (tmp_path / "picture.png").write_bytes(b"")
    with pytest.raises(UsageError, match=tmp_path.name):
        read(tmp_path)
    with pytest.raises(UsageError, match="python-stdlib"):
        read_documents(builtin="python-stlib", paths=[])


def test_builtin_stdlib_is_code_without_tests_or_tables() -> None:
    documents = read_documents(builtin="python-stdlib", paths=[])
    assert 5e6 < sum(map(len, documents)) < 15e6
    assert documents == read_documents(builtin="python-stdlib", paths=[])
    text = "".join(documents)
    assert "class JSONEncoder" in text
    assert "decoding_table = (" not in text and "site-packages/pip" not in documents[0]


def test_builtin_docs_is_prose() -> None:
    documents = read_documents(builtin="python-docs", paths=[])
    assert 4e5 < sum(map(len, documents)) < 3e6
    assert any("assert" in document for document in documents)


def test_many_documents_split_by_hash() -> None:
    documents = [f"document {index}" for index in range(1000)]
    train, validation = split_documents(documents, 0.1)
    assert 60 < len(validation) < 140
    assert sorted(train + validation) == sorted(documents)
    # a document's side does not depend on its neighbours
    assert set(split_documents(documents[::-1][:500], 0.1)[1]) == set(validation) & set(documents[500:])


def test_single_document_splits_by_position() -> None:
    text = "".join(chr(65 + index % 26) for index in range(100))
    assert split_documents([text], 0.1) == ([text[:90]], [text[90:]])
    assert split_documents(["ab"], 0.01) == (["a"], ["b"])
    assert split_documents(["a"], 0.5) == (["a"], [])
    assert split_documents([], 0.5) == ([], [])


def test_hash_split_with_an_empty_side_falls_to_position() -> None:
    documents = ["a" * 50, "b" * 50]
    assert split_documents(documents, 1e-9) == (["a" * 50, "b" * 49], ["b"])
    assert split_documents(documents, 1 - 1e-9) == (["a"], ["a" * 49, "b" * 50])


def test_fingerprint_sees_content_and_borders() -> None:
    assert fingerprint_documents(["ab", "c"]) != fingerprint_documents(["a", "bc"])
    assert fingerprint_documents(["ab", "c"]) == fingerprint_documents(["ab", "c"])


def test_token_ids_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.train([], 257)
    splits = {"train": ["ab", "é"], "validation": []}
    paths = write_token_ids(tmp_path / "data", "code", splits, tokenizer, progress=False)
    token_ids = load_token_ids(paths["train"])
    assert token_ids.dtype == np.uint16 and isinstance(token_ids, np.memmap)
    assert token_ids.tolist() == [*tokenizer.encode("ab"), 0, *tokenizer.encode("é"), 0]
    assert load_token_ids(paths["validation"]).shape == (0,)
    assert sorted(file.name for file in (tmp_path / "data").iterdir()) == ["code.train.npy", "code.validation.npy"]
    assert capsys.readouterr() == ("", "")


class WideEncoder:
    """A vocabulary that uint16 cannot hold, without an end-of-text token."""

    vocab_size = 70_000
    end_of_text = None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[69_999] * len(text) for text in texts]


def test_wide_vocabulary_takes_uint32(tmp_path: Path) -> None:
    paths = write_token_ids(tmp_path, "x", {"train": ["a" * 1_500_000, "b"]}, WideEncoder(), progress=False)
    token_ids = load_token_ids(paths["train"])
    assert token_ids.dtype == np.uint32 and token_ids.shape == (1_500_001,) and int(token_ids[-1]) == 69_999


def test_broken_token_ids_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "code.train.npy"
    for content in (None, b"", b"garbage", b"\x93NUMPY\x01\x00"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UsageError, match=r"code.train.npy"):
            load_token_ids(path)
    np.save(path, np.arange(6, dtype=np.uint16))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UsageError, match=r"code.train.npy"):
        load_token_ids(path)
