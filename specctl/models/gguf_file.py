"""The header of a GGUF file: its metadata, and where its tensors lie; needs no torch, and reads no weight.

Source: the format as ggml describes it (docs/gguf.md there), versions 2 and 3, little endian. Read here rather than
by the `gguf` package, whose reader makes two arrays of each token of the vocabulary. Every length is held against
the file, so that a truncated one is refused before anything is loaded. Knows nothing about models or tokenizers.
"""

import functools
import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specctl.errors import UsageError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_MOST_VALUES = 2**48  # of a tensor; what claims more is no count


class Storage(NamedTuple):
    """How numbers lie in the file: blocks of so many numbers in so many bytes."""

    name: str
    block: int
    num_bytes: int


_STORAGES = {
    0: Storage("F32", 1, 4),
    1: Storage("F16", 1, 2),
    2: Storage("Q4_0", 32, 18),
    3: Storage("Q4_1", 32, 20),
    6: Storage("Q5_0", 32, 22),
    7: Storage("Q5_1", 32, 24),
    8: Storage("Q8_0", 32, 34),
    10: Storage("Q2_K", 256, 84),
    11: Storage("Q3_K", 256, 110),
    12: Storage("Q4_K", 256, 144),
    13: Storage("Q5_K", 256, 176),
    14: Storage("Q6_K", 256, 210),
    28: Storage("F64", 1, 8),
    30: Storage("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """shape: rows first, as torch has it. offset, num_bytes: where it lies in the file."""

    storage: Storage
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufHeader:
    """The header of a file; read once for as long as it does not change.

    Raises UsageError, naming the file and the cause: missing, no GGUF, truncated, split, or of an unknown quantisation.
    """
    try:
        found = os.stat(path)
        return _read(path, found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


@functools.lru_cache(maxsize=4)
def _read(path: Path, size: int, changed: int) -> GgufHeader:
    with open(path, "rb") as file:
        start = file.read(len(_MAGIC))
        if start != _MAGIC:
            raise UsageError(f"{path} is no GGUF file; a model's path is a checkpoint folder or a {SUFFIX} file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                header, data = _Cursor(content).header()
            except (struct.error, IndexError):
                raise UsageError(f"{path} is truncated: its header goes beyond its end; download it again") from None
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path} cannot be read ({error}); download it again") from None
    parts = header.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise UsageError(f"{path} is one of {parts} parts of a model; join them first: llama-gguf-split --merge")
    return GgufHeader(metadata=header.metadata, tensors=_placed(path, header.tensors, data, size))


def _placed(path: Path, tensors: "dict[str, _Entry]", data: int, size: int) -> dict[str, GgufTensor]:
    """The tensors with their places in a file of `size` bytes whose tensors begin at `data`."""
    placed = {}
    for name, (kind, shape, offset) in tensors.items():
        storage = _STORAGES.get(kind)
        if storage is None:
            known = ", ".join(each.name for each in _STORAGES.values())
            raise UsageError(f"{path}: {name} is of quantisation type {kind}, which is not read (read are {known})")
        if shape[-1] % storage.block:
            raise UsageError(f"{path}: {name} is {shape[-1]} wide, which is no multiple of a {storage.name} block")
        num_bytes = math.prod(shape) // storage.block * storage.num_bytes
        end = data + offset + num_bytes
        if end > size:
            raise UsageError(f"{path} is truncated: {name} ends at byte {end:,} of {size:,}; download it again")
        placed[name] = GgufTensor(storage=storage, shape=shape, offset=data + offset, num_bytes=num_bytes)
    return placed


_Entry = tuple[int, tuple[int, ...], int]  # type, shape, offset in the data


class _Raw(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, _Entry]


class _Cursor:
    """A place in a file, which moves on as values are read. struct.error where one goes beyond the end."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._place, self._size = content, len(_MAGIC), len(content)

    def header(self) -> tuple[_Raw, int]:
        """The header, and where the data begins. Raises ValueError for what is no GGUF that is read."""
        version = self._one("I")
        if version not in _VERSIONS:
            if version and not version & 0xFFFF:
                raise ValueError("it is big endian")
            raise ValueError(f"it is of version {version}; versions 2 and 3 are read")
        num_tensors, num_fields = self._one("Q"), self._one("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            self._add(metadata, self._text(), lambda: self._value(self._one("I")))
        tensors: dict[str, _Entry] = {}
        for _ in range(num_tensors):
            self._add(tensors, self._text(), self._tensor)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment!r}, no power of two")
        return _Raw(metadata, tensors), -(-self._place // alignment) * alignment

    def _add(self, found: dict[str, Any], name: str, read: Callable[[], Any]) -> None:
        if name in found:
            raise ValueError(f"it has {name[:60]!r} twice")
        found[name] = read()

    def _tensor(self) -> _Entry:
        count = self._one("I")
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise ValueError(f"it has a tensor of {count} dimensions")
        shape = tuple(reversed(self._many("Q", count)))
        if not 1 <= math.prod(shape) <= _MOST_VALUES:
            raise ValueError(f"it has a tensor of shape {list(shape)}")
        kind, offset = self._one("I"), self._one("Q")
        return kind, shape, offset

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._one(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"it has metadata of type {kind}")
        kind, count = self._one("I"), self._one("Q")
        if kind in _SCALARS:
            return list(self._many(_SCALARS[kind], count))
        self._room(count)  # each value takes a byte at least
        return [self._value(kind) for _ in range(count)]

    def _text(self) -> str:
        length = self._one("Q")
        self._room(length)
        begin, self._place = self._place, self._place + length
        return self._content[begin : self._place].decode("utf-8", errors="replace")

    def _one(self, code: str) -> Any:
        return self._many(code, 1)[0]

    def _many(self, code: str, count: int) -> tuple[Any, ...]:
        self._room(count * struct.calcsize(f"<{code}"))
        layout = struct.Struct(f"<{count}{code}")
        begin, self._place = self._place, self._place + layout.size
        return layout.unpack_from(self._content, begin)

    def _room(self, num_bytes: int) -> None:
        if num_bytes > self._size - self._place:
            raise struct.error
