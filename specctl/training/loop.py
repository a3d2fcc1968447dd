"""The training loop: AdamW, warm-up and cosine, gradient clipping, validation loss.

One loop for targets (cross-entropy) and drafts (cross-entropy, or KL from a frozen teacher).
Randomness comes from the config's seed and the global random state is left as it was; evaluation
changes nothing. Knows nothing about files, corpora's names or the terminal beyond a tqdm bar.
Sources: Loshchilov and Hutter 1711.05101 (AdamW), Hinton et al. 1503.02531 (distillation).

Shapes: B blocks, T tokens, V vocab. Losses are in nats per token.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from specctl.config import TrainingConfig
from specctl.errors import NumericalError, UsageError
from specctl.models.llama import Llama

TokenIds = NDArray[np.unsignedinteger]
Loss = Callable[[Tensor], Tensor]


@dataclass(slots=True, kw_only=True)
class TrainingReport:
    """What a training did. train_loss is the mean over the last tenth of the steps, in its own loss."""

    loss: str
    steps: int
    tokens: int
    seconds: float
    train_loss: float
    validation_loss: float
    interrupted: bool = False
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # step, train loss, validation loss


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

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Blocks at random places, [count, T + 1] int64."""
        return self._at(torch.randint(self._last + 1, (count,), generator=generator).tolist())

    def spread(self, count: int) -> Tensor:
        """At most `count` blocks at even distances, [count, T + 1] int64."""
        return self._at(np.unique(np.linspace(0, self._last, count, dtype=np.int64)).tolist())

    def _at(self, starts: list[int]) -> Tensor:
        rows = [self._ids[start : start + self._size + 1].astype(np.int64) for start in starts]
        return torch.from_numpy(np.stack(rows))


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


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to `final_learning_rate` of the peak."""
    warmup = min(config.warmup_steps, config.steps // 4)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    floor = config.final_learning_rate
    return config.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def estimate_seconds(module: Llama, config: TrainingConfig, teacher: Llama | None) -> float:
    """About how long `train` will take: a few steps, timed on a copy."""
    trial, blocks = copy.deepcopy(module), torch.zeros(config.batch_size, config.block_size + 1, dtype=torch.int64)
    times = []
    for _ in range(4):
        started = perf_counter()
        _loss(trial, blocks, teacher).backward()
        times.append(perf_counter() - started)
    return min(times) * config.steps * 1.15


def train(
    module: Llama,
    name: str,
    train_ids: TokenIds,
    validation_ids: TokenIds,
    config: TrainingConfig,
    *,
    teacher: Llama | None = None,
    progress: bool = False,
) -> TrainingReport:
    """Train in place. Ctrl+C ends it early with `interrupted` set and the weights as they are.

    Raises NumericalError, naming model and step, when the loss is not finite; UsageError when a
    split is smaller than a block.
    """
    train_blocks = Blocks(train_ids, config.block_size, "train")
    held_out = Blocks(validation_ids, config.block_size, "validation").spread(config.eval_blocks)
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = _optimizer(module, config)
    module.dropout = config.dropout
    module.train()
    losses: list[float] = []
    report = TrainingReport(loss=config.loss, steps=0, tokens=0, seconds=0.0, train_loss=0.0, validation_loss=0.0)
    started = perf_counter()
    tokens_a_step = config.batch_size * config.block_size
    bar = tqdm(total=config.steps, desc=name, unit="step", disable=not progress, dynamic_ncols=True)
    with torch.random.fork_rng(devices=[]), bar:
        torch.manual_seed(config.seed)
        try:
            for step in range(config.steps):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(config, step)
                loss = _loss(module, train_blocks.sample(config.batch_size, generator), teacher)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), config.gradient_clip)
                losses.append(float(loss.detach()))
                if not math.isfinite(losses[-1]):
                    raise NumericalError(f"{name}: the loss is {losses[-1]} at step {step}; lower its learning_rate")
                optimizer.step()
                bar.update()
                if bar.n % 10 == 0:
                    rate = bar.n * tokens_a_step / (perf_counter() - started)
                    bar.set_postfix_str(f"loss {sum(losses[-50:]) / len(losses[-50:]):.3f}, {rate:,.0f} tokens/s")
                if (step + 1) % config.eval_interval == 0 and step + 1 < config.steps:
                    held_out_loss = validation_loss(module, held_out, config.batch_size)
                    report.curve.append((step + 1, losses[-1], held_out_loss))
        except KeyboardInterrupt:
            report.interrupted = True
    module.eval()
    tail = losses[-max(1, len(losses) // 10) :]
    report.steps, report.tokens = len(losses), len(losses) * tokens_a_step
    report.train_loss = sum(tail) / len(tail) if tail else math.nan
    report.validation_loss = validation_loss(module, held_out, config.batch_size)
    report.curve.append((report.steps, report.train_loss, report.validation_loss))
    report.seconds = perf_counter() - started
    return report


def _loss(module: Llama, blocks: Tensor, teacher: Llama | None) -> Tensor:
    return cross_entropy(module, blocks) if teacher is None else kl_from(teacher, module, blocks)


def _optimizer(module: Llama, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    matrices = [weight for weight in module.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in module.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, config.beta2), fused=True)
