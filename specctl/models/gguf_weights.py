"""The tensors of a GGUF file under their Hugging Face names, made floating-point numbers as they are read.

The only importer of the `gguf` package, whose functions turn quantised blocks into numbers, some rows at a time: at
no moment is more than one tensor held. Knows nothing about models but the order of Llama's rotated pairs.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.models.gguf_config import gguf_name, hf_name, weights_of
from specctl.models.gguf_file import GgufHeader, GgufTensor
from specctl.models.llama import LlamaShape

_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_VALUES_AT_ONCE = 2**20


class GgufWeights(Mapping[str, Tensor]):
    """Names to tensors, as `Weights` of a folder: each look-up reads that tensor, and keeps nothing.

    path: the file that messages name. shapes, dtypes: of every tensor, known without reading one; float32 of
    quantised ones. A tensor that no model here has keeps its name in the file.
    """

    described_by = "its metadata"

    def __init__(self, path: Path, header: GgufHeader, shape: LlamaShape) -> None:
        """Raises UsageError where tensors are quantised and the `gguf` package is missing."""
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._stored: dict[str, str] = {}
        self._tensors = weights_of(header)
        for stored, tensor in self._tensors.items():
            name = hf_name(stored) or stored
            self.shapes[name], self._stored[name] = tensor.shape, stored
            self.dtypes[name] = _PLAIN.get(tensor.storage.name, torch.float32)
        self._to_numbers = _dequantiser(path) if any(map(_is_quantised, self._tensors.values())) else None
        paired = header.metadata.get("general.architecture") == "llama"
        self._heads = {"attn_q": shape.num_attention_heads, "attn_k": shape.num_key_value_heads} if paired else {}

    def share(self, first: str, second: str) -> None:
        """Make one tensor of two names, of which the file holds one."""
        for name, other in ((first, second), (second, first)):
            if name in self and other not in self:
                self.shapes[other], self.dtypes[other] = self.shapes[name], self.dtypes[name]
                self._stored[other] = self._stored[name]

    def stored_name(self, name: str) -> str:
        """What the file calls a tensor."""
        return self._stored.get(name) or gguf_name(name)

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, self.dtypes[name])

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor, converted as it is read."""
        stored = self._stored[name]
        tensor = self._tensors[stored]
        rows, width = int(np.prod(tensor.shape[:-1])), tensor.shape[-1]
        found, at_once = torch.empty(rows, width, dtype=dtype), max(1, _VALUES_AT_ONCE // width)
        row_bytes = tensor.num_bytes // rows
        try:
            with open(self.path, "rb") as file:
                file.seek(tensor.offset)
                for begin in range(0, rows, at_once):
                    part = found[begin : begin + at_once]
                    raw = bytearray(file.read(len(part) * row_bytes))
                    if len(raw) < len(part) * row_bytes:
                        raise UsageError(f"{self.path} was cut off while it was read; nothing was loaded")
                    part.copy_(self._numbers(raw, tensor).view(part.shape))
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror or error}") from None
        found = found.view(tensor.shape)
        part_of_layer = stored.split(".")[-2]
        return _unpaired(found, self._heads[part_of_layer]) if part_of_layer in self._heads else found

    def _numbers(self, raw: bytearray, tensor: GgufTensor) -> Tensor:
        if not _is_quantised(tensor):
            return torch.frombuffer(raw, dtype=_PLAIN[tensor.storage.name])
        assert self._to_numbers is not None
        return torch.from_numpy(self._to_numbers(np.frombuffer(raw, dtype=np.uint8), tensor.storage.name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _is_quantised(tensor: GgufTensor) -> bool:
    return tensor.storage.name not in _PLAIN


def _unpaired(rows: Tensor, heads: int) -> Tensor:
    """Within each head, from adjacent rotated pairs to halves (0, Hd / 2, ...), as Hugging Face has them."""
    head_dim = rows.shape[0] // heads
    return rows.view(heads, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _dequantiser(path: Path) -> Callable[[Any, str], Any]:
    """A function from the bytes of blocks, and the storage that they are of, to as many numbers in float32."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise UsageError(
            f"{path} is quantised, which needs the gguf package; install it with: pip install 'specctl[gguf]'"
        ) from None
    # One row of all blocks: the package goes through rows in groups of sixteen.
    return lambda raw, name: dequantize(raw[None], GGMLQuantizationType[name])[0]
