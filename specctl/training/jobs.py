"""What a training is made of, by the kind of thing that is trained: the task, its files, its report.

Knows nothing about run folders, recipes or the terminal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specctl.config import DraftModelConfig, MedusaConfig, TargetConfig
from specctl.errors import UsageError
from specctl.models.backend import Module
from specctl.models.checkpoint import save_checkpoint
from specctl.models.llama import Llama, LlamaShape
from specctl.models.medusa import MedusaHeads, MedusaShape
from specctl.models.medusa_checkpoint import save_heads
from specctl.tokenizer import Tokenizer
from specctl.training.language_model import LanguageModelTask, validation_loss
from specctl.training.loop import Task, TrainingReport
from specctl.training.medusa_heads import MedusaTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training to be done. write: writes what is trained into a folder. describe: what its report adds."""

    task: Task
    num_parameters: int
    write: Callable[[Path], None]
    describe: Callable[[TrainingReport], dict[str, Any]]


def model_job(
    source: TargetConfig | DraftModelConfig,
    tokenizer: Tokenizer,
    held_out: Tensor,
    *,
    teacher: Module | None,
    shared: Tensor,
    vocab_size: int,
) -> Job:
    """A language model.

    held_out: validation blocks of its own text; shared: of the target's. teacher: None for cross-entropy.
    vocab_size: rows of its matrices, at least the tokenizer's entries.
    """
    training = source.training
    _refuse_long_blocks(training.block_size, source.model.max_position_embeddings, "the model's own")
    if teacher is not None:
        _refuse_long_blocks(training.block_size, teacher.shape.max_position_embeddings, "the target's")
    module = Llama(LlamaShape(vocab_size=vocab_size, **source.model.model_dump()))
    module.initialise(training.seed)

    def write(folder: Path) -> None:
        save_checkpoint(module, folder, tokenizer.end_of_text)
        tokenizer.save(folder)

    def describe(report: TrainingReport) -> dict[str, Any]:
        """Both losses are the best checkpoint's: on the target's text, and on its own."""
        own = report.figures["validation_loss"]
        loss = own if shared is held_out else validation_loss(module, shared, training.batch_size)
        return {"validation_loss": loss, "own_validation_loss": own}

    task = LanguageModelTask(module=module, held_out=held_out, config=training, teacher=teacher)
    return Job(task=task, num_parameters=module.num_parameters, write=write, describe=describe)


def _refuse_long_blocks(block_size: int, context: int, whose: str) -> None:
    if block_size > context:
        raise UsageError(
            f"training.block_size is {block_size}, above the {context} tokens of {whose} context; lower it"
        )


def heads_job(source: MedusaConfig, target: Module, held_out: Tensor) -> Job:
    """Medusa heads on the frozen target."""
    _refuse_long_blocks(source.training.block_size, target.shape.max_position_embeddings, "the target's")
    target.requires_grad_(False)
    shape = MedusaShape(
        num_heads=source.num_heads,
        num_hidden_layers=source.num_hidden_layers,
        hidden_size=target.shape.hidden_size,
        vocab_size=target.shape.vocab_size,
        original_lm_head=source.original_lm_head,
    )
    heads, training = MedusaHeads(shape, target.lm_head.weight), source.training
    task = MedusaTask(
        module=heads, target=target, held_out=held_out, batch_size=training.batch_size, loss_kind=training.loss
    )
    return Job(
        task=task,
        num_parameters=heads.num_parameters,
        write=lambda folder: save_heads(heads, folder, target),
        describe=lambda report: {},
    )
