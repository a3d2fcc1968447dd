"""The tensors of a checkpoint folder, one file or several shards, read one at a time.

Only safetensors is read, never a pickle. Everything that can be known without reading a tensor (names,
shapes, dtypes, missing shards) is checked when a folder is opened. Knows nothing about models.
"""

import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specctl.errors import UsageError
from specctl.models.headers import INDEX, SINGLE
from specctl.run_folder import read_json


class Weights(Mapping[str, Tensor]):
    """Names to tensors; each look-up reads that tensor from its file, in the file's dtype, and keeps nothing.

    path: the file that messages name. shapes, dtypes: of every tensor, known without reading one.
    """

    described_by = "config.json"

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        """Open a folder's shards, or its one file. Raises UsageError naming the file and the cause."""
        self.path = folder / single
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._places: dict[str, tuple[Path, str]] = {}  # the file, and the name in it
        if self.path.is_file():
            self._add(self.path)
        elif (index := folder / (single + INDEX)).is_file():
            self.path = index
            self._add_shards(index)
        else:
            raise UsageError(_missing(self.path))

    def share(self, first: str, second: str) -> None:
        """Make one tensor of two names, of which a file may hold either; UsageError where it holds two unlike ones."""
        if first in self and second in self:
            alike = (self.shapes[first], self.dtypes[first]) == (self.shapes[second], self.dtypes[second])
            if not (alike and torch.equal(self[first], self[second])):
                raise UsageError(
                    f"{self.path} holds {first} and another {second}, which config.json ties; "
                    "set its tie_word_embeddings to false, or drop the tensor that is not meant"
                )
        for name, other in ((first, second), (second, first)):
            if name in self and other not in self:
                self.shapes[other], self.dtypes[other] = self.shapes[name], self.dtypes[name]
                self._places[other] = self._places[name]

    def stored_name(self, name: str) -> str:
        """What the files call a tensor."""
        return name

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, self.dtypes[name])

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor, converted as it is read."""
        path, stored = self._places[name]
        with _opened(path) as file:  # opened anew: a mapped file would stay in memory as far as it was read
            tensor: Tensor = file.get_tensor(stored)
            return tensor.to(dtype, copy=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _add(self, path: Path) -> list[str]:
        with _opened(path) as file:
            names = list(file.keys())
            for name in names:
                if name.endswith(_CONSTANT):
                    continue
                header = file.get_slice(name)
                if header.get_dtype() not in _DTYPES:
                    raise UsageError(f"{path}: {name} is {header.get_dtype()}; quantised weights are not read")
                if name in self._places:
                    raise UsageError(f"{path} holds {name}, and so does {self._places[name][0].name}; keep one of them")
                self.shapes[name], self.dtypes[name] = tuple(header.get_shape()), _DTYPES[header.get_dtype()]
                self._places[name] = path, name
        return names

    def _add_shards(self, index: Path) -> None:
        content = read_json(index)
        places = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(places, dict) or not places or not all(map(_is_file_name, places.values())):
            raise UsageError(f"{index} has no weight_map from tensors to files of its folder; download it again")
        files = sorted(set(places.values()))
        missing = [file for file in files if not (index.parent / file).is_file()]
        if missing:
            more = f" (and {len(missing) - 1} more shards)" if len(missing) > 1 else ""
            raise UsageError(f"{index} names {missing[0]}{more}, which is missing; put it there; nothing was loaded")
        holds = {file: set(self._add(index.parent / file)) for file in files}
        for name, file in places.items():
            if name not in holds[file]:
                raise UsageError(f"{index} says that {name} lies in {file}, which lacks it; nothing was loaded")


_CONSTANT = "rotary_emb.inv_freq"  # older transformers wrote what follows from the config
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[^/\\\0]+\.safetensors", value) is not None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; UsageError naming it where it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} cannot be read ({error}); it is truncated or not safetensors") from None


def _missing(path: Path) -> str:
    """What to say where a folder has no safetensors weights: how to convert it where it has others."""
    folder = path.parent
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if not any(name.startswith(("pytorch_model", "model", "consolidated")) for name in pickles):
        return f"{path} is missing; a checkpoint folder holds config.json and {SINGLE}"
    place = json.dumps(str(folder))
    code = (
        "from transformers import AutoModelForCausalLM as Model; "
        f"Model.from_pretrained({place}).save_pretrained({place}, safe_serialization=True)"
    )
    return f"{path} is missing; {pickles[0]} is a pickle and is not read; convert it: python -c {shlex.quote(code)}"


def refuse_difference(
    path: Path, expected: Mapping[str, Any], found: Mapping[str, Any], described_by: str = "config.json"
) -> None:
    """Raise UsageError for tensors (shapes by name) that are missing, foreign or of another shape.

    described_by: what says how they should be.
    """
    problems = [f"lacks {name}" for name in expected if name not in found]
    problems += [f"has the foreign tensor {name}" for name in found if name not in expected]
    problems += [
        f"has {name} of shape {list(found[name])}, {described_by} says {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise UsageError(f"{path} {problems[0]}{more}; nothing was loaded")
