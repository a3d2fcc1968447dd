"""A corpus's documents to train / validation token ids on disk, in one pass and in bounded memory.

A survey goes before: it reads everything once and says what decides the split. Knows nothing about where
documents come from, nor about models; of a tokenizer it knows only the three members of `Encoder`.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np

from specctl.config import CorpusConfig
from specctl.documents import Document, read_documents, text_files
from specctl.errors import UsageError
from specctl.progress import Progress, silent
from specctl.run_folder import atomic_writer, fingerprint

BATCH_CHARACTERS = 1_000_000
SAMPLE_CHARACTERS = 32_000_000  # of a larger text, a tokenizer is trained on this much, spread evenly

Split = Literal["train", "validation"]


class Encoder(Protocol):
    """What corpora need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int | None: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What one reading of a corpus tells.

    fingerprint: 16 hex digits that depend on every document's content and on their order. cut: None where each
    document's hash decides its side; else the number of characters that are train, all after them validation.
    """

    fingerprint: str
    num_documents: int
    num_characters: int
    cut: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a document's text on one side of the split. ends: nothing of the document follows on that side."""

    split: Split
    text: str
    ends: bool


def survey(config: CorpusConfig) -> Survey:
    """Read a corpus once, whole. Raises what `read_documents` raises.

    A document's hash decides its side, so that equal documents stay together. One document, or a split by hash
    that leaves a side empty, is split by position instead: the last `validation_fraction` of the characters is
    validation.
    """
    content = hashlib.sha256(b"[")
    num_documents = num_validation = num_characters = 0
    for document in read_documents(config):
        digest, length = document.measure()
        content.update(b'%s"%s"' % (b"," if num_documents else b"", digest.hex().encode("ascii")))
        num_documents += 1
        num_characters += length
        num_validation += _side(digest, config.validation_fraction) == "validation"
    content.update(b"]")
    cut = None
    if num_validation in (0, num_documents):
        cut = num_characters - round(num_characters * config.validation_fraction)
        cut = max(min(cut, num_characters - 1), min(1, num_characters))  # one character a side where there are two
    return Survey(
        fingerprint=content.hexdigest()[:16], num_documents=num_documents, num_characters=num_characters, cut=cut
    )


def read_survey(fields: Any, path: Path) -> Survey:
    """A survey as it was written to `path`. Raises UsageError where it is not one any more."""
    types = {"fingerprint": (str,), "num_documents": (int,), "num_characters": (int,), "cut": (int, type(None))}
    if (
        not isinstance(fields, dict)
        or fields.keys() != types.keys()
        or not all(type(fields[name]) in allowed for name, allowed in types.items())
    ):
        raise UsageError(f"{path} was changed since it was written; remove it")
    return Survey(**fields)


def state_of_files(config: CorpusConfig) -> str | None:
    """Return a fingerprint of the names, sizes and times of a corpus's files: while it stays, so does the survey.

    None for built-in text. Raises UsageError naming a path that is missing.
    """
    if config.builtin is not None:
        return None
    try:
        stats = [(str(path), path.stat()) for path in text_files(config.paths)]
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror or error}") from error
    files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return fingerprint([Survey.__slots__, config.text_field, config.validation_fraction, files])


def split_pieces(config: CorpusConfig, surveyed: Survey) -> Iterator[Piece]:
    """Yield the whole corpus in order, each piece with its side."""
    if surveyed.cut is not None:
        yield from _split_by_position(read_documents(config), surveyed.cut)
        return
    for document in read_documents(config):
        split = _side(document.measure()[0], config.validation_fraction)
        for text, ends in document.pieces():
            yield Piece(split=split, text=text, ends=ends)


def training_sample(config: CorpusConfig, surveyed: Survey, name: str, *, progress: Progress = silent) -> Iterator[str]:
    """Yield the train split's text; of a corpus above SAMPLE_CHARACTERS, evenly spread pieces of that size in all."""
    share = min(1.0, SAMPLE_CHARACTERS / max(1, surveyed.num_characters))
    seen = taken = done = 0
    with progress(f"reading {name}", "character") as update:
        for piece in split_pieces(config, surveyed):
            if piece.split == "train":
                if taken <= seen * share:
                    yield piece.text
                    taken += len(piece.text)
                seen += len(piece.text)
            done += len(piece.text)
            update(done, surveyed.num_characters)


def write_token_ids(
    folder: Path,
    name: str,
    pieces: Iterable[Piece],
    tokenizer: Encoder,
    *,
    num_characters: int,
    progress: Progress = silent,
) -> None:
    """Write the token ids of each split to `folder/NAME.SPLIT.npy`, flat, in the order of the pieces.

    An end-of-text id follows each document. dtype: uint16 where the vocabulary fits, else uint32. num_characters:
    of all pieces, to tell how far it is.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    done = 0
    with progress(f"tokenising {name}", "character") as update, contextlib.ExitStack() as stack:
        files = {
            split: stack.enter_context(array_writer(folder / f"{name}.{split}.npy", dtype))
            for split in ("train", "validation")
        }
        for batch in _batches(pieces):
            for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
                files[piece.split].write(np.array(ids + end if piece.ends else ids, dtype=dtype).tobytes())
            done += sum(len(piece.text) for piece in batch)
            update(done, num_characters)


def load_token_ids(path: Path) -> np.ndarray:
    """Return the ids [T] of a file that `write_token_ids` wrote, memory-mapped; UsageError if broken."""
    try:
        token_ids: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UsageError(f"cannot read token ids {path}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise UsageError(f"{path} holds no token ids ({error}): delete it to have it made again") from error
    if token_ids.ndim != 1 or token_ids.dtype.kind != "u":
        raise UsageError(f"{path} holds no flat token ids: delete it to have it made again")
    return token_ids


def _side(digest: bytes, validation_fraction: float) -> Split:
    return "validation" if int.from_bytes(digest) / 2**256 < validation_fraction else "train"


def _split_by_position(documents: Iterable[Document], cut: int) -> Iterator[Piece]:
    """Cut at one place; the document that the cut falls into is parted in two, the others stay whole."""
    start = 0
    for document in documents:
        for text, ends in document.pieces():
            inside = max(0, min(cut - start, len(text)))
            if inside:
                yield Piece(split="train", text=text[:inside], ends=ends or start + inside == cut)
            if inside < len(text):
                yield Piece(split="validation", text=text[inside:], ends=ends)
            start += len(text)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def array_writer(path: Path, dtype: "np.dtype[Any]") -> Iterator[BinaryIO]:
    """Yield a file for the raw elements of a flat array that becomes `path`: its length is filled in at the end."""

    def write_header(file: BinaryIO, length: int) -> int:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(file, header)  # padded by numpy so that the length may grow
        return file.tell()

    with atomic_writer(path) as file:
        start = write_header(file, 0)
        yield file
        length = (file.tell() - start) // dtype.itemsize
        file.seek(0)
        again = write_header(file, length)
        assert again == start
