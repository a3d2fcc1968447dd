"""Blocks of text for training and evaluation, cut from a flat array of token ids.

Knows nothing about where the ids came from. Shapes: T tokens.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.errors import UsageError

TokenIds = NDArray[np.unsignedinteger]


class Blocks:
    """Random and evenly spaced blocks of T + 1 tokens from a flat array of ids."""

    def __init__(self, ids: TokenIds, block_size: int, split: str) -> None:
        """Raises UsageError naming the split, what it needs and what it has."""
        if len(ids) < block_size + 1:
            raise UsageError(
                f"the {split} split has {len(ids)} tokens and a block needs {block_size + 1}; "
                "give more text or lower training.block_size"
            )
        self._ids, self._size = ids, block_size
        self._last = len(ids) - block_size - 1

    def largest_id(self) -> int:
        """Of the whole text."""
        return int(self._ids.max())

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Blocks at random places, [count, T + 1] int64."""
        return self._at(torch.randint(self._last + 1, (count,), generator=generator).tolist())

    def spread(self, count: int) -> Tensor:
        """At most `count` blocks at even distances, [count, T + 1] int64."""
        return self._at(np.unique(np.linspace(0, self._last, count, dtype=np.int64)).tolist())

    def _at(self, starts: list[int]) -> Tensor:
        rows = [self._ids[start : start + self._size + 1].astype(np.int64) for start in starts]
        return torch.from_numpy(np.stack(rows))
