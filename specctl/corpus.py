"""Text from built-in sources, files and folders, to train / validation token ids on disk.

A document is one text, in a fixed order. Knows nothing about models; of a tokenizer it knows only the
three members of `Encoder`.
"""

import codecs
import fnmatch
import hashlib
import io
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specctl.errors import UsageError
from specctl.run_folder import atomic_writer, fingerprint

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
BATCH_CHARACTERS = 1_000_000
SECTION_CHARACTERS = 4_000
SKIPPED_FOLDERS = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("__pycache__", "lib-dynload", "pydoc_data", "msilib", "config-*"),
)
CODE_TABLES = (
    *("aliases", "cp*", "iso*", "mac_*", "koi8_*", "kz1048", "big5*", "euc_*", "gb*", "hp_roman8", "hz"),
    *("johab", "palmos", "ptcp154", "shift_jis*", "tis_620"),
)
GENERATED_TABLES = (
    *("_sysconfigdata*.py", "html/entities.py", "stringprep.py"),
    *(f"encodings/{name}.py" for name in CODE_TABLES),
)
PROSE_FILES = ("*.txt", "*.rst", "README*")
NOT_PROSE = ("lib2to3/*Grammar*.txt", "config-*", "idlelib/Icons/*")


class Encoder(Protocol):
    """What corpora need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int | None: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


def read_documents(*, builtin: str | None, paths: Sequence[str]) -> list[str]:
    """Return the documents of a corpus in a fixed order, empty ones left out.

    `builtin` is python-stdlib (sources of the running Python's standard library) or python-docs (the English
    prose that ships with it). `paths` are files, and folders in which every .txt, .md, .rst and .py is read
    (hidden ones are not). Text is UTF-8; a byte order mark is dropped, line ends stay as they are.
    Raises UsageError naming what is missing, unreadable or not UTF-8 (with the byte's offset).
    """
    if builtin == "python-stdlib":
        documents: Iterable[str] = _python_stdlib()
    elif builtin == "python-docs":
        documents = _python_docs()
    elif builtin is not None:
        raise UsageError(f"unknown built-in corpus {builtin!r}: choose python-stdlib or python-docs")
    else:
        documents = (_read_text(path) for path in _text_files(paths))
    return [document for document in documents if document]


def split_documents(documents: list[str], validation_fraction: float) -> tuple[list[str], list[str]]:
    """Return (train, validation), decided by each document's hash, so that equal documents stay together.

    One document, or a split by hash that leaves a side empty, is split by position instead: the last
    `validation_fraction` of the characters is validation.
    """
    train: list[str] = []
    validation: list[str] = []
    for document in documents:
        share = int.from_bytes(_digest(document)) / 2**256
        (validation if share < validation_fraction else train).append(document)
    if len(documents) > 1 and train and validation:
        return train, validation
    return _split_by_position(documents, validation_fraction)


def fingerprint_documents(documents: Iterable[str]) -> str:
    """Return 16 hex digits that depend on every document's content and on their order."""
    return fingerprint([_digest(document).hex() for document in documents])


def write_token_ids(
    folder: Path, name: str, splits: dict[str, list[str]], tokenizer: Encoder, progress: bool
) -> dict[str, Path]:
    """Write the token ids of each split to `folder/NAME.SPLIT.npy`, flat, and return the paths by split.

    An end-of-text id follows each document. dtype: uint16 where the vocabulary fits, else uint32.
    """
    from tqdm import tqdm

    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    num_characters = sum(len(document) for documents in splits.values() for document in documents)
    paths: dict[str, Path] = {}
    with tqdm(
        total=num_characters, desc=f"tokenising {name}", unit="char", unit_scale=True, disable=not progress, leave=False
    ) as bar:
        for split, documents in splits.items():
            arrays: list[np.ndarray] = []
            for batch in _batches(documents):
                arrays.append(_encode(batch, tokenizer, dtype))
                bar.update(sum(len(document) for document in batch))
            paths[split] = folder / f"{name}.{split}.npy"
            _write_array(paths[split], arrays, dtype)
    return paths


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


def _python_stdlib() -> Iterator[str]:
    root = _stdlib_folder()
    for path in _walk(root, ("*.py",)):
        if not _matches(path.relative_to(root).as_posix(), GENERATED_TABLES):
            data = _read_bytes(path)
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)  # a few sources are not UTF-8
            yield data.decode(encoding)


def _python_docs() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield from _sections(topics[name])
    root = _stdlib_folder()
    for path in _walk(root, PROSE_FILES):
        if not _matches(path.relative_to(root).as_posix(), NOT_PROSE):
            # old change logs hold stray Latin-1 names
            yield from _sections(_read_bytes(path).decode("utf-8", errors="replace"))


def _sections(text: str) -> Iterator[str]:
    """Cut a long text at blank lines: a few huge documents would leave the split by hash to luck."""
    section = ""
    for paragraph in re.split(r"(?<=\n\n)", text):
        section += paragraph
        if len(section) >= SECTION_CHARACTERS:
            yield section
            section = ""
    yield section


def _stdlib_folder() -> Path:
    folder = Path(sysconfig.get_path("stdlib"))
    if not folder.is_dir():
        raise UsageError(f"this Python has no standard library folder ({folder}): give the corpus paths instead")
    return folder


def _walk(root: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files below the standard library's root that match, sorted, without tests and packages."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _matches(name, SKIPPED_FOLDERS)]  # not entered at all
        found += [Path(folder, name) for name in names if _matches(name, patterns)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _text_files(paths: Sequence[str]) -> list[Path]:
    """Return the files that `paths` stand for, in order, each once."""
    files: dict[Path, None] = {}
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            inside = sorted(
                file
                for file in path.rglob("*")
                if file.suffix.lower() in TEXT_SUFFIXES
                and not any(part.startswith(".") for part in file.relative_to(path).parts)
                and file.is_file()
            )
            if not inside:
                raise UsageError(f"folder {path} holds no text files ({', '.join(TEXT_SUFFIXES)})")
            files.update(dict.fromkeys(file.resolve() for file in inside))
        elif path.exists():
            files[path.resolve()] = None
        else:
            raise UsageError(f"corpus path {path} does not exist")
    return list(files)


def _read_text(path: Path) -> str:
    data = _read_bytes(path)
    try:
        return data.decode("utf-8").removeprefix(codecs.BOM_UTF8.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8: bad byte 0x{data[error.start]:02x} at byte offset {error.start}; convert the file"
        ) from error


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def _digest(document: str) -> bytes:
    return hashlib.sha256(document.encode("utf-8")).digest()


def _split_by_position(documents: list[str], validation_fraction: float) -> tuple[list[str], list[str]]:
    """Cut at one place; the document that the cut falls into is parted in two, the others stay whole."""
    num_characters = sum(len(document) for document in documents)
    cut = num_characters - round(num_characters * validation_fraction)
    cut = max(min(cut, num_characters - 1), min(1, num_characters))  # one character a side where there are two
    train: list[str] = []
    validation: list[str] = []
    start = 0
    for document in documents:
        inside = max(0, min(cut - start, len(document)))
        train.append(document[:inside])
        validation.append(document[inside:])
        start += len(document)
    return [document for document in train if document], [document for document in validation if document]


def _batches(documents: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(documents: list[str], tokenizer: Encoder, dtype: "np.dtype[Any]") -> np.ndarray:
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    return np.concatenate([np.array(ids + end, dtype=dtype) for ids in tokenizer.encode_batch(documents)])


def _write_array(path: Path, arrays: list[np.ndarray], dtype: "np.dtype[Any]") -> None:
    shape = (sum(len(array) for array in arrays),)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with atomic_writer(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for array in arrays:
            file.write(array.tobytes())
