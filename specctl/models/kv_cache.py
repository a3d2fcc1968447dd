"""Keys and values of the tokens seen so far, in memory that is allocated once or, where it grows, doubled.

Shapes: L layers, B sequences, Hkv key-value heads, S positions, T new tokens, Hd head dim.
"""

import torch
from torch import Tensor

from specctl.errors import SpecctlError
from specctl.models.llama import LlamaShape

_FIRST_POSITIONS = 1024


class KVCache:
    """The cache of B equally long sequences.

    capacity: the most tokens that it may hold; memory is taken for fewer at first, and doubled when those are full.
    block: the positions of memory are a multiple of it, and so many lie together in whatever order their user chooses.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        batch_size: int,
        num_key_value_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        block: int = 1,
    ) -> None:
        self._block = block
        positions = self._whole_blocks(min(capacity, _FIRST_POSITIONS))
        shape = (num_layers, 2, batch_size, num_key_value_heads, positions, head_dim)
        self._allocate(torch.zeros(shape, dtype=dtype, device=device))
        self.batch_size, self.capacity = batch_size, capacity
        self.length = 0

    def _whole_blocks(self, positions: int) -> int:
        return -(-positions // self._block) * self._block

    def _allocate(self, storage: Tensor) -> None:
        self._storage = storage  # [L, 2, B, Hkv, S, Hd]
        keys, values = storage.flatten(2, 3).unbind(1)  # [L, B Hkv, S, Hd] each
        self._keys, self._values = keys.transpose(2, 3), values
        self._slots = storage.permute(0, 2, 4, 1, 3, 5)  # [L, B, S, 2, Hkv, Hd]

    def reserve(self, num_tokens: int) -> tuple[int, int]:
        """Make room for tokens; return the positions (start, end) to write. Raises SpecctlError when full."""
        start, end = self.length, self.length + num_tokens
        if end > self.capacity:
            raise SpecctlError(f"context is full: {end} tokens, room for {self.capacity}; shorten the prompt")
        if end > (positions := self._storage.shape[4]):
            larger = self._whole_blocks(min(self.capacity, max(end, 2 * positions)))
            grown = self._storage.new_zeros((*self._storage.shape[:4], larger, self._storage.shape[5]))
            kept = self._whole_blocks(start)
            grown[:, :, :, :, :kept] = self._storage[:, :, :, :, :kept]
            self._allocate(grown)
        self.length = end
        return start, end

    @property
    def storage(self) -> Tensor:
        """All of its memory, [L, 2, B, Hkv, S, Hd]: keys, then values."""
        return self._storage

    def slots(self, start: int, end: int) -> tuple[Tensor, ...]:
        """Where each layer writes the keys and values of new tokens, [B, T, 2, Hkv, Hd] each."""
        return self._slots[:, :, start:end].unbind()

    def keys(self, end: int) -> tuple[Tensor, ...]:
        """Each layer's keys up to position `end`, transposed: [B Hkv, Hd, end]."""
        return self._keys[..., :end].unbind()

    def values(self, end: int) -> tuple[Tensor, ...]:
        """Each layer's values up to position `end`, [B Hkv, end, Hd]."""
        return self._values[:, :, :end].unbind()

    def keep(self, lengths: tuple[int, ...]) -> None:
        """Forget everything after `lengths` (equal for all rows)."""
        if len(set(lengths)) != 1 or len(lengths) != self.batch_size:
            raise SpecctlError(f"rows of unequal length are not supported: {lengths}")
        if not 0 <= lengths[0] <= self.length:
            raise ValueError(f"cannot keep {lengths[0]} tokens of {self.length}")
        self.length = lengths[0]


def cache_for(shape: LlamaShape, batch_size: int, dtype: torch.dtype, device: torch.device, block: int = 1) -> KVCache:
    """An empty cache for a Llama's whole context."""
    return KVCache(
        num_layers=shape.num_hidden_layers,
        batch_size=batch_size,
        num_key_value_heads=shape.num_key_value_heads,
        capacity=shape.max_position_embeddings,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=device,
        block=block,
    )
