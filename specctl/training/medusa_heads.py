"""Training Medusa heads on a frozen target: what each head should have said, and how long its chains would be.

Head i at position t of a block learns the token of position t + 2 + i: from the text (ce), or from the
target's whole distribution for it (kl, acceptance). The heads are judged by the acceptance length that they
would give at temperature 1, along the text. Knows nothing about optimizers, files or the terminal.
Source: Cai et al. 2401.10774, section 2.2 (weights 0.8^i), Leviathan et al. 2211.17192 (the overlap).

Shapes: B blocks, T tokens, H heads, D width, V vocab.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.config import LossKind
from specctl.models.backend import Module
from specctl.models.medusa import MedusaHeads
from specctl.training import chunks
from specctl.training.loop import Evaluation
from specctl.training.losses import cross_entropy, divergence

HEAD_WEIGHT = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaTask:
    """A `Task` of the training loop. held_out: validation blocks [N, T + 1], longer than the heads look ahead."""

    module: MedusaHeads
    target: Module
    held_out: Tensor
    batch_size: int
    loss_kind: LossKind

    def loss(self, blocks: Tensor) -> Tensor:
        """Mean over the heads, head i weighted 0.8^i."""
        if not chunks.fits(blocks[:, :-1], self.module.shape.vocab_size):
            return self._loss_in_pieces(blocks)
        hidden, logits = self._read(blocks)
        wanted = F.log_softmax(logits, -1) if self.loss_kind != "ce" else None
        total, weights = torch.zeros(()), 0.0
        for head, found in self._predictions(hidden):
            if wanted is None:
                loss = cross_entropy(found, _labels(blocks, head))
            else:
                loss = divergence(self.loss_kind, found, wanted[:, 1 + head :])
            total = total + HEAD_WEIGHT**head * loss
            weights += HEAD_WEIGHT**head
        return total / weights

    def _loss_in_pieces(self, blocks: Tensor) -> Tensor:
        """The same where the logits of a block are too many to be held."""
        ids, dtype = blocks[:, :-1], next(self.module.parameters()).dtype
        hidden, wanted = chunks.states(self.target, ids).to(dtype), chunks.Distributions(self.target, ids, dtype)
        total, weights = torch.zeros(()), 0.0
        for head in range(self.module.shape.num_heads):
            labels, length = _labels(blocks, head), ids.shape[1] - 1 - head

            def loss(piece: chunks.Piece, head: int = head, labels: Tensor = labels) -> Tensor:
                found, (block, part) = self.module.head(head, hidden[piece]), piece
                if self.loss_kind == "ce":
                    return cross_entropy(found, labels[piece])
                ahead = slice(part.start + 1 + head, part.stop + 1 + head)
                return divergence(self.loss_kind, found, wanted.log_probs((block, ahead)))

            found = chunks.mean_loss(loss, len(ids), length, self.module.shape.vocab_size)
            total = total + HEAD_WEIGHT**head * found
            weights += HEAD_WEIGHT**head
        return total / weights

    @torch.no_grad()
    def _read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The frozen target's hidden states [B, T, D] and logits [B, T, V]."""
        forward, dtype = self.target(blocks[:, :-1]), next(self.module.parameters()).dtype
        return forward.hidden.to(dtype), forward.logits.to(dtype)

    def _predictions(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The logits of each head at every position that it can be judged at, [B, T - 1 - i, V]."""
        for head in range(self.module.shape.num_heads):
            yield head, self.module.head(head, hidden[:, : hidden.shape[1] - 1 - head])

    def evaluate(self) -> Evaluation:
        """Top-1 and top-5 accuracy of each head, and 1 + the mean of sum_i prod_{j <= i} sum_x min(p, q_j)."""
        num_heads, vocab_size = self.module.shape.num_heads, self.module.shape.vocab_size
        lengths, hits = list[Tensor](), torch.zeros(num_heads, 2, dtype=torch.float64)
        judged = torch.zeros(num_heads, dtype=torch.float64)
        dtype = next(self.module.parameters()).dtype
        for blocks in self.held_out.split(self.batch_size):
            ids = blocks[:, :-1]
            hidden, wanted = chunks.states(self.target, ids).to(dtype), chunks.Distributions(self.target, ids, dtype)
            overlaps = torch.zeros(num_heads, *ids.shape)
            for block, part in chunks.pieces(len(ids), ids.shape[1], vocab_size):
                probs = wanted.log_probs((block, part)).exp()
                for head in range(num_heads):  # what a head says of these positions it says 1 + head before them
                    here = slice(max(0, part.start - 1 - head), max(0, part.stop - 1 - head))
                    found, labels = self.module.head(head, hidden[block, here]), _labels(blocks, head)[block, here]
                    overlap = torch.minimum(found.softmax(-1), probs[len(probs) - len(found) :]).sum(-1)
                    overlaps[head, block, here] = overlap
                    right = found.topk(5, -1).indices == labels[:, None]
                    hits[head] += torch.stack((right[:, 0].sum(), right.any(-1).sum())).double()
                    judged[head] += len(found)
            chains = overlaps[:, :, : ids.shape[1] - num_heads].cumprod(0)  # positions that every head is judged at
            lengths.append((1 + chains.sum(0)).flatten())
        expected = float(torch.cat(lengths).mean())
        accuracy = (hits / judged[:, None]).tolist()
        figures = {"expected_acceptance_length": expected}
        for head, (top_1, top_5) in enumerate(accuracy):
            figures |= {f"head_{head}_top_1": top_1, f"head_{head}_top_5": top_5}
        top_1 = "/".join(f"{100 * first:.0f}" for first, _ in accuracy)
        return Evaluation(score=expected, figures=figures, summary=f"length {expected:.2f}, top-1 {top_1} %")


def _labels(blocks: Tensor, head: int) -> Tensor:
    """The tokens that a head should have said, [B, T - 1 - i]."""
    return blocks[:, 2 + head :]
