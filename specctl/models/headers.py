"""The tensors of a safetensors folder as its headers describe them; needs no torch, and reads no weight.

Only safetensors is read, never a pickle. Knows the names of files, and nothing about models.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from specctl.errors import UsageError
from specctl.run_folder import read_json

SINGLE = "model.safetensors"
ORIGINAL_HEADS = "medusa_lm_head.safetensors"  # Medusa heads of their original repository
INDEX = ".index.json"  # what follows the name of the one file in that of the index of its shards
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LONGEST_HEADER = 100_000_000  # bytes, by the format's own rule


class TensorHeader(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


def has_weights(folder: Path, single: str = SINGLE) -> bool:
    """Whether a folder has this file, or its shards' index."""
    return any((folder / name).is_file() for name in (single, single + INDEX))


def weight_files(folder: Path, single: str = SINGLE) -> list[Path]:
    """The file, or its shards. Raises UsageError where one is missing."""
    whole, index = folder / single, folder / (single + INDEX)
    if whole.is_file():
        return [whole]
    if not index.is_file():
        pickled = any(folder.glob("*.bin"))
        why = (
            "; weights in .bin files are pickles, which are never read: convert them to safetensors" if pickled else ""
        )
        raise UsageError(f"{folder} has neither {whole.name} nor {index.name}{why}")
    content = read_json(index)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not all(_is_file_name(name) for name in shards.values()):
        raise UsageError(f"{index} names no shards (weight_map)")
    names = sorted(set(shards.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UsageError(f"{folder} lacks {missing[0]}, one of {len(missing)} missing shards of {len(names)}")
    return [folder / name for name in names]


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name == Path(name).name


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file. Raises UsageError, naming it, where it is truncated or not safetensors."""
    found, size = {}, path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"its header of {length} bytes does not fit")
            header = json.loads(file.read(length).decode("utf-8"))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(f"{name} lies beyond its end")
            dtype = _DTYPES.get(tensor["dtype"], str(tensor["dtype"]).lower())
            found[name] = TensorHeader(dtype, tuple(map(int, tensor["shape"])), end - begin)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error}); it is truncated or not safetensors") from None
    return found
