"""Losses over a large vocabulary, a piece of the positions at a time.

A block of logits [B, T, V] of 8 x 256 positions and 152,064 tokens is 1.2 GB, and a step would hold several. Where one
exceeds `LIMIT` the output matrix and the loss run over pieces of positions, each computed again in the backward pass
(checkpointing, Chen et al. 1604.06174), so that no more than a piece's logits are held.

Shapes: B blocks, T tokens, D width, V vocab, N positions of a piece.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specctl.models.backend import Module
from specctl.models.llama import Llama

LIMIT = 256 * 2**20  # bytes of logits that are held at once
_BYTES = 4  # of a logit in training

Piece = tuple[int, slice]  # a block, and positions in it


def fits(ids: Tensor, vocab_size: int) -> bool:
    """Whether the logits of ids [B, T] may be held whole."""
    return ids.numel() * vocab_size * _BYTES <= LIMIT


def pieces(num_blocks: int, length: int, vocab_size: int) -> Iterator[Piece]:
    """All positions of [num_blocks, length], block by block."""
    size = max(1, LIMIT // (_BYTES * vocab_size))
    for block in range(num_blocks):
        for start in range(0, length, size):
            yield block, slice(start, min(start + size, length))


def mean_loss(loss: Callable[[Piece], Tensor], num_blocks: int, length: int, vocab_size: int) -> Tensor:
    """The mean over all positions of a loss that is a mean over a piece's; with its gradient, computed twice."""
    total, count = torch.zeros(()), num_blocks * length
    for block, part in pieces(num_blocks, length, vocab_size):
        found = checkpoint(loss, (block, part), use_reentrant=False, preserve_rng_state=False)
        total = total + found * ((part.stop - part.start) / count)
    return total


class Distributions:
    """A frozen model's distribution at every position of ids [B, T], made piece by piece.

    What runs behind transformers gives its logits with its pass, so one block's are held whole.
    """

    def __init__(self, model: Module, ids: Tensor, dtype: torch.dtype) -> None:
        self._model, self._ids, self._dtype = model, ids, dtype
        self._hidden = states(model, ids) if isinstance(model, Llama) else None
        self._block, self._logits = -1, torch.empty(0)

    @torch.no_grad()
    def log_probs(self, piece: Piece) -> Tensor:
        """[N, V]."""
        block, part = piece
        if self._hidden is not None:
            logits = self._model.lm_head(self._hidden[block, part])
        else:
            if block != self._block:
                self._block, self._logits = block, self._model(self._ids[block][None]).logits[0]
            logits = self._logits[part]
        return F.log_softmax(logits.to(self._dtype), -1)


@torch.no_grad()
def states(model: Module, ids: Tensor) -> Tensor:
    """A frozen model's hidden states [B, T, D], from which its logits come; no more than a block's logits are made."""
    if isinstance(model, Llama):
        return model.states(ids)
    return torch.cat([model(block[None]).hidden for block in ids])
