"""Text from built-in sources, files, folders, patterns and JSON lines, as a stream of documents.

A document is one text; it is read a bounded piece at a time, so that no file's size is ever the memory's.
(One line of a .jsonl file is held whole, hence the limit on it.) Knows nothing about splits or tokens.
"""

import codecs
import fnmatch
import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.builtin_text import python_docs, python_stdlib
from specctl.config import CorpusConfig, nearest
from specctl.errors import UsageError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
CHUNK_BYTES = 100_000  # read at a time; blocks much above a piece would leave the heap full of holes
PIECE_CHARACTERS = 100_000
BORDER_CHARACTERS = 4_000  # how far back from its end a piece looks for a border
LINE_BYTES = 64_000_000  # longest line of a .jsonl file
LAST_SPACE = re.compile(r".*\S(?= \S)", re.DOTALL)
LAST_BLANK = re.compile(r".+(?=[ \t\r\n]\S)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text. read: its text from the start, in chunks of any size; each call reads afresh."""

    read: Callable[[], Iterable[str]]

    def measure(self) -> tuple[bytes, int]:
        """Return the sha256 of the text (32 bytes) and its length in characters."""
        digest, num_characters = hashlib.sha256(), 0
        for chunk in self.read():
            digest.update(chunk.encode("utf-8"))
            num_characters += len(chunk)
        return digest.digest(), num_characters

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield (piece, whether it is the last) with at most PIECE_CHARACTERS each; joined they are the text.

        A piece ends before a single space, or else before the last blank of a run: byte-level BPE starts a word
        there anyway, so that the tokens of the pieces are those of the whole. Text without a blank for
        BORDER_CHARACTERS is cut where the piece is full, at the cost of a token.
        """
        rest = ""
        for chunk in self.read():
            rest += chunk
            while len(rest) > PIECE_CHARACTERS:
                cut = _border(rest)
                yield rest[:cut], False
                rest = rest[cut:]
        if rest:
            yield rest, True


def read_documents(config: CorpusConfig) -> Iterator[Document]:
    """Yield the documents of a corpus in a fixed order, empty ones left out.

    `builtin` is python-stdlib (sources of the running Python's standard library) or python-docs (the English
    prose that ships with it). `paths` are as in `text_files`. Each line of a .jsonl file is an object and a
    document, its text in `text_field`; blank lines are skipped; any other file is one document. Text is UTF-8; a
    byte order mark is dropped, line ends stay as they are. Raises UsageError naming what is missing, unreadable
    or not UTF-8 (with the byte's offset), and the line where a line is at fault.
    """
    if config.builtin is not None:
        texts = python_stdlib() if config.builtin == "python-stdlib" else python_docs()
        yield from (_in_memory(text) for text in texts if text)
        return
    for path in text_files(config.paths):
        if path.suffix.lower() == ".jsonl":
            yield from (_in_memory(text) for text in _json_lines(path, config.text_field) if text)
        elif _size(path) > CHUNK_BYTES:
            yield Document(read=lambda path=path: _chunks(path))  # type: ignore[misc]  # bound now, not when called
        elif text := "".join(_chunks(path)):
            yield _in_memory(text)


def text_files(paths: Sequence[str]) -> list[Path]:
    """Return the files that `paths` stand for, in order, each once.

    A path is a file, a folder, in which every .txt, .md, .rst, .py and .jsonl is meant (hidden ones are not), or
    a pattern (`notes/**/*.md`: ** is any depth, hidden names and links excepted). ~ is the home folder; a relative
    path is relative to the working directory. Raises UsageError naming a path that does not exist or holds no text.
    """
    files: dict[Path, None] = {}
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            found, nothing = _inside(path, set()), f"folder {path} holds no text files ({', '.join(TEXT_SUFFIXES)})"
        elif path.exists():
            found, nothing = _single(path), ""
        elif glob.has_magic(given):
            walked: set[str] = set()
            found = []
            for match in _matches(Path(path.anchor), path.relative_to(path.anchor).parts):
                found += _inside(match, walked) if match.is_dir() else _single(match)
            nothing = f"corpus pattern {given} matches no text file"
        else:
            found, nothing = [], f"corpus path {path} does not exist"
        if not found:
            raise UsageError(f"{nothing}; relative paths start at {Path.cwd()}")
        files.update(dict.fromkeys(found))
    return list(files)


def _matches(root: Path, parts: Sequence[str]) -> list[Path]:
    """What lies below a folder by the parts of a pattern, as `glob` has it, in order of the names.

    Links may go round in circles: ** follows none, and a folder that others lead to is gone on from once.
    """
    found = [root]
    for part in (*parts, "*") if parts[-1] == "**" else parts:
        folders = _distinct(found)
        if part == "**":
            found = [below for folder in folders for below in _folders_below(folder)]
        elif glob.has_magic(part):
            found = [folder / name for folder in folders for name in _names(folder, part)]
        else:
            found = [folder / part for folder in folders if (folder / part).exists()]
    return sorted(found)


def _distinct(paths: Iterable[Path]) -> list[Path]:
    """Each file or folder once, under the first of its names."""
    found: dict[str, Path] = {}
    for path in sorted(paths):
        found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _folders_below(folder: Path) -> Iterator[Path]:
    """A folder and all in it that are no links and not hidden; none for what is no folder or may not be read."""
    for parent, subfolders, _ in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield Path(parent)


def _names(folder: Path, part: str) -> list[str]:
    """The names in a folder that match a part of a pattern; none for what is no folder or may not be read."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [
        name for name in names if fnmatch.fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))
    ]


def _single(path: Path) -> list[Path]:
    if not path.is_file():
        raise UsageError(f"corpus path {path} is not a file or folder that can be read")
    return [path.resolve()]


def _inside(folder: Path, walked: set[str]) -> list[Path]:
    """Return the text files below a folder, sorted by the names that they have there, without what is hidden.

    walked: real paths of the folders that are known by now; they are left out, and what is walked here is added.
    """

    def refuse(error: OSError) -> None:
        raise UsageError(f"cannot read folder {error.filename}: {error.strerror or error}") from error

    found = []
    for parent, subfolders, names in os.walk(folder.resolve(), onerror=refuse):
        if parent in walked:
            subfolders.clear()
            continue
        walked.add(parent)
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    texts = sorted(path for path in found if path.suffix.lower() in TEXT_SUFFIXES and path.is_file())
    return [path.resolve() if path.is_symlink() else path for path in texts]  # to resolve each costs seconds


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _chunks(path: Path) -> Iterator[str]:
    """Yield a file's text, read CHUNK_BYTES at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0  # of what is not yet decoded: a character may lie across two chunks
    try:
        with open(path, "rb") as file:
            while True:
                data = file.read(CHUNK_BYTES)
                text = decoder.decode(data, final=not data)
                yield text.removeprefix("\ufeff") if offset == 0 else text
                if not data:
                    return
                offset = file.tell() - len(decoder.getstate()[0])
    except UnicodeDecodeError as error:
        raise _not_text(path, error, offset) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _json_lines(path: Path, field: str) -> Iterator[str]:
    offset = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), start=1):
                where = f"{path}, line {number}"
                if len(line) > LINE_BYTES:
                    raise UsageError(f"{where} is longer than {LINE_BYTES:,} bytes; give such a text as a .txt file")
                if line.strip():
                    yield _field(line.decode("utf-8").removeprefix("\ufeff" if number == 1 else ""), field, where)
                offset += len(line)
    except UnicodeDecodeError as error:
        raise _not_text(path, error, offset) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _field(line: str, field: str, where: str) -> str:
    """Return the text of one line of a .jsonl file."""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON ({error}); each line must be one object") from error
    if not isinstance(value, dict):
        raise UsageError(f"{where} is not a JSON object; each line must be one, with its text in {field!r}")
    if field not in value:
        raise UsageError(f"{where} has no field {field!r}{nearest(field, list(value))}; set the corpus's text_field")
    text = value[field]
    if not isinstance(text, str):
        raise UsageError(f"{where}: the field {field!r} is not a string; set the corpus's text_field")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UsageError(f"{where}: the field {field!r} holds half a character ({half}); mend the file") from error
    return text


def _not_text(path: Path, error: UnicodeDecodeError, offset: int) -> UsageError:
    bad, at = error.object[error.start], offset + error.start
    return UsageError(f"{path} is not UTF-8: bad byte 0x{bad:02x} at byte offset {at}; convert or unpack the file")


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read {path}: {error.strerror or error}")


def _border(text: str) -> int:
    """Return where the first piece of a longer text ends."""
    start = PIECE_CHARACTERS - BORDER_CHARACTERS
    window = text[start : PIECE_CHARACTERS + 1]  # a border is known by the character after it
    found = LAST_SPACE.match(window) or LAST_BLANK.match(window)
    return start + found.end() if found else PIECE_CHARACTERS


def _in_memory(text: str) -> Document:
    # in slices, or each of the pieces of a long text would copy all that follows it
    return Document(read=lambda: (text[start : start + CHUNK_BYTES] for start in range(0, len(text), CHUNK_BYTES)))
