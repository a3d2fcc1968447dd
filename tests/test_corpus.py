"""Every character lands on one side of the split, once and in order; memory does not grow with the text."""

import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from specctl import corpus as module
from specctl import documents
from specctl.config import CorpusConfig
from specctl.corpus import Piece, load_token_ids, split_pieces, state_of_files, survey, training_sample, write_token_ids
from specctl.errors import UsageError
from specctl.tokenizer import Tokenizer


@pytest.fixture
def corpus(tmp_path: Path) -> "Corpora":
    return Corpora(tmp_path)


class Corpora:
    """Makes a corpus of the documents given, as files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def __call__(self, texts: Sequence[str], validation_fraction: float = 0.1) -> CorpusConfig:
        self._count += 1
        folder = self._folder / f"corpus {self._count}"
        folder.mkdir()
        for index, text in enumerate(texts):
            (folder / f"{index:05}.txt").write_text(text, encoding="utf-8")
        return CorpusConfig(paths=(str(folder),), validation_fraction=validation_fraction)


def split(config: CorpusConfig) -> tuple[list[str], list[str]]:
    """The documents of (train, validation), as the pieces say where they end."""
    sides: dict[str, list[str]] = {"train": [], "validation": []}
    open_ones = {"train": "", "validation": ""}
    for piece in split_pieces(config, survey(config)):
        open_ones[piece.split] += piece.text
        if piece.ends:
            sides[piece.split].append(open_ones[piece.split])
            open_ones[piece.split] = ""
    assert set(open_ones.values()) == {""}
    return sides["train"], sides["validation"]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", 16)
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 10)
    monkeypatch.setattr(documents, "BORDER_CHARACTERS", 8)


# The split


def test_many_documents_split_by_hash(corpus: Corpora) -> None:
    texts = [f"document {index}" for index in range(400)]
    train, validation = split(corpus(texts))
    assert 20 < len(validation) < 65
    assert sorted(train + validation) == sorted(texts)
    # a document's side does not depend on its neighbours
    assert set(split(corpus(texts[::-1][:200]))[1]) == set(validation) & set(texts[200:])


def test_hash_splits_do_not_depend_on_pieces(corpus: Corpora, request: pytest.FixtureRequest) -> None:
    config = corpus([f"document {index} " * (index % 7 + 1) for index in range(200)], 0.3)
    whole = split(config)
    request.getfixturevalue("small_pieces")
    assert split(config) == whole
    assert sum(1 for _ in split_pieces(config, survey(config))) > 500


@pytest.mark.parametrize("pieces", ["whole", "small_pieces"])
def test_single_document_splits_by_position(corpus: Corpora, request: pytest.FixtureRequest, pieces: str) -> None:
    if pieces != "whole":
        request.getfixturevalue(pieces)
    text = "".join(chr(65 + index % 26) for index in range(100))
    assert split(corpus([text])) == ([text[:90]], [text[90:]])
    assert split(corpus([text], 0.17)) == ([text[:83]], [text[83:]])
    assert split(corpus(["ab"], 0.01)) == (["a"], ["b"])
    assert split(corpus(["a"], 0.5)) == (["a"], [])
    assert split(corpus([""], 0.5)) == ([], [])


@pytest.mark.parametrize("pieces", ["whole", "small_pieces"])
def test_hash_split_with_an_empty_side_falls_to_position(
    corpus: Corpora, request: pytest.FixtureRequest, pieces: str
) -> None:
    if pieces != "whole":
        request.getfixturevalue(pieces)
    texts = ["a" * 50, "b" * 50]
    assert split(corpus(texts, 1e-9)) == (["a" * 50, "b" * 49], ["b"])
    assert split(corpus(texts, 1 - 1e-9)) == (["a"], ["a" * 49, "b" * 50])


def test_fingerprint_is_of_contents_and_borders(corpus: Corpora, tmp_path: Path) -> None:
    def fingerprint(*texts: str) -> str:
        return survey(corpus(texts)).fingerprint

    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint("ab", "c") != fingerprint("c", "ab")
    assert fingerprint("ab", "", "c") == fingerprint("ab", "c")
    (tmp_path / "same.jsonl").write_text('{"text": "ab"}\n{"text": "c"}')
    assert survey(CorpusConfig(paths=(f"{tmp_path}/same.jsonl",))).fingerprint == fingerprint("ab", "c")


def test_fingerprint_does_not_depend_on_pieces(corpus: Corpora, request: pytest.FixtureRequest) -> None:
    config = corpus(["é日👩 x" * 50, "short"])
    whole = survey(config)
    request.getfixturevalue("small_pieces")
    assert survey(config) == whole and whole.num_documents == 2 and whole.num_characters == 255


def test_state_of_files_changes_with_any_of_them(corpus: Corpora) -> None:
    config = corpus(["one", "two"])
    seen = [state_of_files(config)]
    assert state_of_files(config) == seen[0]
    folder = Path(config.paths[0])
    (folder / "00001.txt").write_text("three")
    seen.append(state_of_files(config))
    (folder / "00002.txt").write_text("")
    seen.append(state_of_files(config))
    (folder / "00002.txt").rename(folder / "00003.txt")
    seen.append(state_of_files(config))
    seen.append(state_of_files(config.model_copy(update={"text_field": "body"})))
    seen.append(state_of_files(config.model_copy(update={"validation_fraction": 0.2})))
    assert len(set(seen)) == 6
    assert state_of_files(CorpusConfig(builtin="python-docs")) is None


# Samples


def sample(config: CorpusConfig) -> list[str]:
    return list(training_sample(config, survey(config), "text"))


def test_the_sample_of_a_small_text_is_its_train_split(corpus: Corpora) -> None:
    config = corpus([f"document {index}" for index in range(100)])
    assert sample(config) == split(config)[0]


def test_the_sample_of_a_large_text_is_bounded_and_spread(corpus: Corpora, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_CHARACTERS", 1000)
    taken = "".join(sample(corpus([f"{index:04} " * 2 for index in range(400)])))
    assert 850 <= len(taken) <= 1000  # of the 4,000 characters a tenth is validation
    places = [int(word) for word in taken.split()[::2]]
    assert max(np.diff([0, *places, 400])) < 15


# Token ids


def pieces_of(**texts: list[str]) -> Iterator[Piece]:
    return (Piece(split=split, text=text, ends=True) for split, all_ in texts.items() for text in all_)  # type: ignore[arg-type]


def test_token_ids_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.train([], 257)
    pieces = pieces_of(train=["ab", "é"])
    write_token_ids(tmp_path / "data", "code", pieces, tokenizer, num_characters=3)
    token_ids = load_token_ids(tmp_path / "data" / "code.train.npy")
    assert token_ids.dtype == np.uint16 and isinstance(token_ids, np.memmap)
    assert token_ids.tolist() == [*tokenizer.encode("ab"), 0, *tokenizer.encode("é"), 0]
    assert load_token_ids(tmp_path / "data" / "code.validation.npy").shape == (0,)
    assert sorted(file.name for file in (tmp_path / "data").iterdir()) == ["code.train.npy", "code.validation.npy"]
    assert capsys.readouterr() == ("", "")


def test_one_end_of_text_a_document_and_side(corpus: Corpora, tmp_path: Path, small_pieces: None) -> None:
    tokenizer = Tokenizer.train([], 257)
    text = "some words and then some more words, far more than one piece\n" * 5
    config = corpus([text], 0.3)
    pieces = split_pieces(config, survey(config))
    write_token_ids(tmp_path, "code", pieces, tokenizer, num_characters=len(text))
    train, validation = (load_token_ids(tmp_path / f"code.{side}.npy").tolist() for side in ("train", "validation"))
    cut = len(text) - round(len(text) * 0.3)
    assert train == [*tokenizer.encode(text[:cut]), 0]
    assert validation == [*tokenizer.encode(text[cut:]), 0]


class WideEncoder:
    """A vocabulary that uint16 cannot hold, without an end-of-text token."""

    vocab_size = 70_000
    end_of_text = None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[69_999] * len(text) for text in texts]


def test_wide_vocabulary_takes_uint32(tmp_path: Path) -> None:
    pieces = pieces_of(train=["a" * 1_500_000, "b"])
    write_token_ids(tmp_path, "x", pieces, WideEncoder(), num_characters=1_500_001)
    token_ids = load_token_ids(tmp_path / "x.train.npy")
    assert token_ids.dtype == np.uint32 and token_ids.shape == (1_500_001,) and int(token_ids[-1]) == 69_999


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    def failing() -> Iterator[Piece]:
        yield from pieces_of(train=["a" * 1_500_000])
        raise UsageError("bad byte")

    with pytest.raises(UsageError, match="bad byte"):
        write_token_ids(tmp_path, "x", failing(), WideEncoder(), num_characters=1)
    assert list(tmp_path.iterdir()) == []


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


# Memory


class SparseEncoder:
    """One token a text: what is measured is the text's memory, not the ids'."""

    vocab_size = 257
    end_of_text = 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[1] for _ in texts]


LINE = "a line of text that is read, measured, cut, tokenised and forgotten\n"
BYTES = 24_000_000


@pytest.mark.parametrize("kind", ["one file", "many files", "JSON lines"])
def test_memory_does_not_grow_with_the_text(tmp_path: Path, kind: str) -> None:
    count = BYTES // len(LINE)
    if kind == "one file":
        (tmp_path / "a.txt").write_text(LINE * count)
    elif kind == "many files":
        for index in range(60):
            (tmp_path / f"{index}.txt").write_text(f"{index}\n" + LINE * (count // 60))
    else:
        line = LINE[:-1] * 300
        (tmp_path / "a.jsonl").write_text(f'{{"text": "{line}"}}\n' * (count // 300))
    config = CorpusConfig(paths=(str(tmp_path),))
    tracemalloc.start()
    try:
        surveyed = survey(config)
        assert sum(map(len, training_sample(config, surveyed, "text"))) > BYTES // 2
        pieces = split_pieces(config, surveyed)
        write_token_ids(tmp_path / "ids", "text", pieces, SparseEncoder(), num_characters=BYTES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert surveyed.num_characters > 0.9 * BYTES
    assert peak < BYTES / 2
