"""Keys and values of the tokens seen so far, in memory allocated once.

Shapes: L layers, B sequences, Hkv key-value heads, S positions, Hd head dim. Keys and values of a
layer lie side by side, so that a pass writes both with one copy.
"""

import torch
from torch import Tensor

from specctl.errors import SpecctlError


class KVCache:
    """A preallocated cache whose rows are equally long.

    layers: L tensors [B, 2 Hkv, S, Hd], keys in the first Hkv heads and values in the rest.
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
    ) -> None:
        shape = (batch_size, 2 * num_key_value_heads, capacity, head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._halves = [layer.chunk(2, dim=1) for layer in self.layers]
        self.batch_size, self.capacity = batch_size, capacity
        self.length = 0

    def reserve(self, num_tokens: int) -> tuple[int, int]:
        """Make room for tokens; return the positions (start, end) to write. Raises SpecctlError when full."""
        start, end = self.length, self.length + num_tokens
        if end > self.capacity:
            raise SpecctlError(f"context is full: {end} tokens, room for {self.capacity}; shorten the prompt")
        self.length = end
        return start, end

    def layer(self, index: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values up to position `end`, each a view [B, Hkv, end, Hd]."""
        keys, values = self._halves[index]
        return keys[:, :, :end], values[:, :, :end]

    def keep(self, lengths: tuple[int, ...]) -> None:
        """Forget everything after `lengths` (equal for all rows)."""
        if len(set(lengths)) != 1 or len(lengths) != self.batch_size:
            raise SpecctlError(f"rows of unequal length are not supported: {lengths}")
        if not 0 <= lengths[0] <= self.length:
            raise ValueError(f"cannot keep {lengths[0]} tokens of {self.length}")
        self.length = lengths[0]
