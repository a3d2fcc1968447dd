"""Training a language model: cross-entropy on text, or the distance to a frozen teacher.

Both are judged by validation cross-entropy. Knows nothing about optimizers, files or the terminal.

Shapes: B blocks, T tokens. Losses are in nats per token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.config import TrainingConfig
from specctl.models.backend import Module
from specctl.models.llama import Llama
from specctl.training import chunks
from specctl.training.loop import Evaluation
from specctl.training.losses import cross_entropy, divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelTask:
    """A `Task` of the training loop. held_out: validation blocks [N, T + 1]. teacher: None for cross-entropy."""

    module: Llama
    held_out: Tensor
    config: TrainingConfig
    teacher: Module | None = None

    def __post_init__(self) -> None:
        self.module.dropout = self.config.dropout

    def loss(self, blocks: Tensor) -> Tensor:
        teacher, ids = self.teacher, blocks[:, :-1]
        if teacher is None:
            return text_loss(self.module, blocks)
        if chunks.fits(ids, self.module.shape.vocab_size):
            with torch.no_grad():
                logits = teacher(ids).logits
            found = self.module(ids).logits
            return divergence(self.config.loss, found, F.log_softmax(logits.to(found.dtype), -1))
        hidden = self.module.states(ids)
        wanted = chunks.Distributions(teacher, ids, hidden.dtype)

        def loss(piece: chunks.Piece) -> Tensor:
            return divergence(self.config.loss, self.module.lm_head(hidden[piece]), wanted.log_probs(piece))

        return chunks.mean_loss(loss, len(ids), ids.shape[1], self.module.shape.vocab_size)

    def evaluate(self) -> Evaluation:
        loss = validation_loss(self.module, self.held_out, self.config.batch_size)
        return Evaluation(score=-loss, figures={"validation_loss": loss}, summary=f"validation loss {loss:.3f}")


def text_loss(module: Llama, blocks: Tensor) -> Tensor:
    """Mean -log p(next token), nats."""
    ids, labels = blocks[:, :-1], blocks[:, 1:]
    if chunks.fits(ids, module.shape.vocab_size):
        return cross_entropy(module(ids).logits, labels)
    hidden = module.states(ids)

    def loss(piece: chunks.Piece) -> Tensor:
        return cross_entropy(module.lm_head(hidden[piece]), labels[piece])

    return chunks.mean_loss(loss, len(ids), ids.shape[1], module.shape.vocab_size)


@torch.no_grad()
def validation_loss(module: Llama, blocks: Tensor, batch_size: int) -> float:
    """Mean cross-entropy over blocks [N, T + 1], nats; the module comes back in the mode it had."""
    was_training = module.training
    module.eval()
    total = sum(float(text_loss(module, part)) * len(part) for part in blocks.split(batch_size))
    module.train(was_training)
    return total / len(blocks)
