"""The training loop: AdamW, warm-up and cosine, gradient clipping, evaluation, the best checkpoint.

It trains whatever a `Task` names, by the task's own loss and judged by the task's own score. At every
evaluation it hands out its state, from which `train` goes on bit for bit (with the same number of
threads). Randomness comes from the config's seed, the global random state is left as it was, and
evaluation changes nothing. Knows nothing about models, files or the terminal.
Source: Loshchilov and Hutter 1711.05101 (AdamW).

Shapes: B blocks, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor, nn

from specctl.config import TrainingConfig
from specctl.errors import NumericalError
from specctl.hardware import peak_memory
from specctl.progress import Progress, silent
from specctl.training.blocks import Blocks
from specctl.training.state import TrainingState

Weights = dict[str, Tensor]

# Of the weights, once a training is under way: AdamW's two moments, the best so far, and while it is saved the last,
# and all four of these as they are written.
_COPIES_TO_COME = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation found. score: higher is better, it decides which checkpoint is the best.

    figures: what the report keeps. summary: the same in a few words, for whoever waits.
    """

    score: float
    figures: dict[str, float]
    summary: str


class Task(Protocol):
    """What is trained, and for what."""

    @property
    def module(self) -> nn.Module:
        """What is trained, saved and restored: all of its parameters."""

    def loss(self, blocks: Tensor) -> Tensor:
        """The loss of blocks [B, T + 1], with its gradient; called in training mode."""

    def evaluate(self) -> Evaluation:
        """How good the module is now; called in evaluation mode, without gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """An evaluation after `step` steps. train_loss: mean over the steps since the evaluation before."""

    step: int
    train_loss: float
    score: float
    figures: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What a training did. train_loss is the mean over the last tenth of the steps, in the task's loss.

    steps: done, the step of the last checkpoint. best_step: that of the best one. figures: the best one's.
    """

    steps: int
    best_step: int
    tokens: int
    seconds: float
    train_loss: float
    figures: dict[str, float]
    interrupted: bool
    curve: list[CurvePoint]


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to `final_learning_rate` of the peak."""
    warmup = min(config.warmup_steps, config.steps // 4)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    floor = config.final_learning_rate
    return config.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a training will take. num_bytes: of memory, at its peak; None where the system does not say."""

    seconds: float
    num_bytes: int | None


def estimate(task: Task, config: TrainingConfig, steps: int) -> Estimate:
    """What `steps` steps will take about: a few are timed, without their update. Changes nothing."""
    blocks, times = torch.zeros(config.batch_size, config.block_size + 1, dtype=torch.int64), []
    with torch.random.fork_rng(devices=[]):
        for _ in range(4):
            started = perf_counter()
            task.loss(blocks).backward()
            times.append(perf_counter() - started)
    task.module.zero_grad(set_to_none=True)
    so_far, weights = peak_memory(), sum(weight.nbytes for weight in task.module.parameters())
    return Estimate(
        seconds=min(times) * steps * 1.15, num_bytes=None if so_far is None else so_far + _COPIES_TO_COME * weights
    )


def train(
    task: Task,
    name: str,
    blocks: Blocks,
    config: TrainingConfig,
    *,
    state: TrainingState | None = None,
    save: Callable[[TrainingState], None] = lambda state: None,
    stop: Callable[[], bool] = lambda: False,
    progress: Progress = silent,
) -> tuple[TrainingReport, Weights]:
    """Train the task's module in place, or go on from `state`; return the report and the last weights.

    The module ends with the best weights among all evaluations, the first of equals. `save` is called
    with the state at every evaluation, and once more where `stop`, asked after each step, ends the
    training early; its tensors are those in use, to be written before the next step changes them. (An
    early end is then evaluated for the report; the state knows nothing of that.)
    Raises NumericalError, naming model and step, when a loss or a score is not finite.
    """
    with torch.random.fork_rng(devices=[]), progress(f"training {name}", "step") as update:
        torch.manual_seed(config.seed)
        run = _Run(task, name, config)
        if state is not None:
            run.restore(state)
        task.module.train()
        while run.step < config.steps:
            run.take_step(blocks)
            update(run.step, config.steps, run.summary if run.step % 10 == 0 else "")
            evaluated = run.step % config.eval_interval == 0 or run.step == config.steps
            if evaluated:
                run.evaluate()
                save(run.state())
            if stop() and run.step < config.steps:
                if not evaluated:
                    save(run.state())
                    run.evaluate()
                break
        task.module.eval()
        return run.report(), run.put_best()


class _Run:
    """A training under way: all that changes in it, and that its state therefore holds."""

    def __init__(self, task: Task, name: str, config: TrainingConfig) -> None:
        self._task, self._name, self._config = task, name, config
        self._optimizer = _optimizer(task.module, config)
        self._generator = torch.Generator().manual_seed(config.seed)
        self._losses: list[float] = []
        self._curve: list[CurvePoint] = []
        self._best: Weights = {}
        self._began, self._seconds_before, self._steps_before = perf_counter(), 0.0, 0
        self._evaluation = ""

    @property
    def step(self) -> int:
        return len(self._losses)

    @property
    def seconds(self) -> float:
        return self._seconds_before + perf_counter() - self._began

    @property
    def summary(self) -> str:
        steps = self.step - self._steps_before
        rate = steps * self._config.batch_size * self._config.block_size / (perf_counter() - self._began)
        return f"loss {_mean(self._losses[-50:]):.3f}, {rate:,.0f} tokens/s{self._evaluation}"

    def take_step(self, blocks: Blocks) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._config, self.step)
        loss = self._task.loss(blocks.sample(self._config.batch_size, self._generator))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self._config.gradient_clip is not None:
            torch.nn.utils.clip_grad_norm_(self._task.module.parameters(), self._config.gradient_clip)
        self._refuse_infinite("loss", float(loss.detach()))
        self._optimizer.step()
        self._losses.append(float(loss.detach()))

    def evaluate(self) -> None:
        self._task.module.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = self._task.evaluate()
        self._task.module.train()
        self._refuse_infinite("score of the evaluation", found.score)
        if not self._curve or found.score > max(point.score for point in self._curve):
            self._best = self._weights()
        since = self._curve[-1].step if self._curve else 0
        train_loss = _mean(self._losses[since:])
        point = CurvePoint(step=self.step, train_loss=train_loss, score=found.score, figures=found.figures)
        self._curve.append(point)
        self._evaluation = f", {found.summary}"

    def _refuse_infinite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise NumericalError(f"{self._name}: the {what} is {value} at step {self.step}; lower its learning_rate")

    def _weights(self) -> Weights:
        return {name: weight.detach().clone() for name, weight in self._task.module.named_parameters()}

    def state(self) -> TrainingState:
        moments = {
            f"optimizer.{index}.{key}": value
            for index, values in self._optimizer.state_dict()["state"].items()
            for key, value in values.items()
        }
        tensors = {
            **{f"last.{name}": weight for name, weight in self._weights().items()},
            **{f"best.{name}": weight for name, weight in self._best.items()},
            **moments,
            "random.blocks": self._generator.get_state(),
            "random.global": torch.get_rng_state(),
            "losses": torch.tensor(self._losses, dtype=torch.float64),
        }
        values = {"curve": [asdict(point) for point in self._curve], "seconds": self.seconds}
        return TrainingState(step=self.step, tensors=tensors, values=values)

    def restore(self, state: TrainingState) -> None:
        load_weights(self._task.module, _part(state.tensors, "last."))
        self._best = _part(state.tensors, "best.")
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in _part(state.tensors, "optimizer.").items():
            index, key = name.split(".")
            moments.setdefault(int(index), {})[key] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self._generator.set_state(state.tensors["random.blocks"])
        torch.set_rng_state(state.tensors["random.global"])
        self._losses = state.tensors["losses"].tolist()
        self._curve = [CurvePoint(**point) for point in state.values["curve"]]
        self._seconds_before, self._steps_before = state.values["seconds"], self.step

    def report(self) -> TrainingReport:
        best = max(self._curve, key=lambda point: point.score)
        return TrainingReport(
            steps=self.step,
            best_step=best.step,
            tokens=self.step * self._config.batch_size * self._config.block_size,
            seconds=self.seconds,
            train_loss=_mean(self._losses[-max(1, self.step // 10) :]),
            figures=best.figures,
            interrupted=self.step < self._config.steps,
            curve=self._curve,
        )

    def put_best(self) -> Weights:
        """Leave the module with its best weights; return the last ones."""
        last = self._weights()
        load_weights(self._task.module, self._best)
        return last


def load_weights(module: nn.Module, weights: Weights) -> None:
    """Copy weights into the parameters of the same names."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])


def _part(tensors: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _optimizer(module: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    matrices = [weight for weight in module.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in module.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, config.beta2), fused=True)
