"""Training a language model: cross-entropy on text, or KL from a frozen teacher.

Both are judged by validation cross-entropy. Knows nothing about optimizers, files or the terminal.
Source: Hinton et al. 1503.02531 (distillation).

Shapes: B blocks, T tokens, V vocab. Losses are in nats per token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.config import TrainingConfig
from specctl.models.llama import Llama
from specctl.training.loop import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelTask:
    """A `Task` of the training loop. held_out: validation blocks [N, T + 1]. teacher: None for cross-entropy."""

    module: Llama
    held_out: Tensor
    config: TrainingConfig
    teacher: Llama | None = None

    def __post_init__(self) -> None:
        self.module.dropout = self.config.dropout

    def loss(self, blocks: Tensor) -> Tensor:
        if self.teacher is None:
            return cross_entropy(self.module, blocks)
        return kl_from(self.teacher, self.module, blocks)

    def evaluate(self) -> Evaluation:
        loss = validation_loss(self.module, self.held_out, self.config.batch_size)
        return Evaluation(score=-loss, figures={"validation_loss": loss}, summary=f"validation loss {loss:.3f}")


def cross_entropy(module: Llama, blocks: Tensor) -> Tensor:
    """Mean -log p(next token), nats."""
    logits = module(blocks[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())


def kl_from(teacher: Llama, module: Llama, blocks: Tensor) -> Tensor:
    """Mean KL(teacher || module) over the positions of the blocks, nats."""
    with torch.no_grad():
        wanted = F.log_softmax(teacher(blocks[:, :-1]).logits, -1)
    found = F.log_softmax(module(blocks[:, :-1]).logits, -1)
    return F.kl_div(found.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean")


@torch.no_grad()
def validation_loss(module: Llama, blocks: Tensor, batch_size: int) -> float:
    """Mean cross-entropy over blocks [N, T + 1], nats; the module comes back in the mode it had."""
    was_training = module.training
    module.eval()
    total = sum(float(cross_entropy(module, part)) * len(part) for part in blocks.split(batch_size))
    module.train(was_training)
    return total / len(blocks)
