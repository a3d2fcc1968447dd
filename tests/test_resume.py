"""A training that stopped, however it stopped, goes on bit for bit, and what is on disk is always whole."""

import errno
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import Tiny
from torch import Tensor, nn

from specctl import run_folder
from specctl.config import TrainingConfig
from specctl.errors import SpecctlError, UsageError
from specctl.models.checkpoint import load_checkpoint, save_checkpoint
from specctl.models.llama import Llama, LlamaShape
from specctl.training import checkpoints, loop, state
from specctl.training.blocks import Blocks
from specctl.training.language_model import LanguageModelTask
from specctl.training.loop import Evaluation, Task, TrainingReport, Weights, estimate, train
from specctl.training.state import TrainingState, load_state, save_state, state_path, stop_signals

SHAPE = LlamaShape(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=32,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
BLOCKS = Blocks(np.arange(600, dtype=np.uint16) * 7 % 32, 8, "train")


def model(seed: int = 0) -> Llama:
    module = Llama(SHAPE)
    module.initialise(seed)
    return module


def settings(**changes: Any) -> TrainingConfig:
    return TrainingConfig(
        **{"steps": 40, "batch_size": 2, "block_size": 8, "learning_rate": 1e-2, "eval_interval": 10, **changes}
    )


def task_of(config: TrainingConfig) -> LanguageModelTask:
    teacher = model(9).eval() if config.loss == "kl" else None
    return LanguageModelTask(module=model(), held_out=BLOCKS.spread(4), config=config, teacher=teacher)


def at_step(wanted: int) -> Callable[[], bool]:
    """A `stop` that asks for it after so many steps."""
    asked = iter(range(1, 1000))
    return lambda: next(asked) == wanted


def figures_of(report: TrainingReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__dataclass_fields__ if name != "seconds"}


def equal(these: Weights, those: Weights) -> bool:
    return these.keys() == those.keys() and all(torch.equal(these[name], those[name]) for name in these)


def weights_of(task: Task) -> Weights:
    return dict(task.module.named_parameters())


# The loop


@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize("stopped_at", [1, 7, 20, 23, 39])
def test_two_parts_equal_one(loss: str, stopped_at: int, tmp_path: Path) -> None:
    config = settings(loss=loss, dropout=0.3)
    whole = task_of(config)
    expected, expected_last = train(whole, "whole", BLOCKS, config)
    path = tmp_path / "state"
    first = train(
        task_of(config),
        "first",
        BLOCKS,
        config,
        save=lambda found: save_state(path, found, {}),
        stop=at_step(stopped_at),
    )[0]
    assert (first.steps, first.interrupted) == (stopped_at, True)
    found = load_state(path)
    assert found is not None and found[0].step == stopped_at
    torch.manual_seed(123)  # whatever happened to the global random state in between
    second = task_of(config)
    report, last = train(second, "second", BLOCKS, config, state=found[0])
    assert figures_of(report) == figures_of(expected) and not report.interrupted
    assert equal(last, expected_last) and equal(weights_of(second), weights_of(whole))
    assert not equal(train(task_of(settings(loss=loss)), "plain", BLOCKS, settings(loss=loss))[1], last)


class Scored:
    """A task with given scores, so that no rounding decides which of its checkpoints is the best."""

    def __init__(self, task: LanguageModelTask, scores: list[float]) -> None:
        self.module, self.loss, self._evaluate = task.module, task.loss, task.evaluate
        self._scores = iter(scores)

    def evaluate(self) -> Evaluation:
        return replace(self._evaluate(), score=next(self._scores))


def stopped_at(step: int, config: TrainingConfig) -> TrainingState:
    """The state of a training that was the best at step 20, as it was when the training stopped."""
    states: list[TrainingState] = []
    train(Scored(task_of(config), [2.0, 1.0]), "first", BLOCKS, config, save=states.append, stop=at_step(step))
    assert [found.step for found in states] == [20, step]
    return states[-1]


@pytest.mark.parametrize("forgotten", ["last.", "optimizer.", "random.blocks", "random.global", "losses", "best."])
def test_all_of_the_state_matters(forgotten: str) -> None:
    """Of the last steps, over which the report's loss is the mean, some were before the stop and some come after."""
    config = settings(dropout=0.3, eval_interval=20)
    whole = Scored(task_of(config), [2.0, 1.0])
    expected, last = train(whole, "whole", BLOCKS, config)
    assert expected.best_step == 20
    state, other = stopped_at(38, config), stopped_at(38, settings(dropout=0.3, eval_interval=20, seed=1))

    def goes_on_the_same(tensors: Weights) -> bool:
        second = Scored(task_of(config), [1.0])
        copied = {name: tensor.clone() for name, tensor in tensors.items()}
        report, found = train(second, "second", BLOCKS, config, state=replace(state, tensors=copied))
        same = equal(found, last) and equal(weights_of(second), weights_of(whole))
        return same and figures_of(report) == figures_of(expected)

    wrong = {name: (other if name.startswith(forgotten) else state).tensors[name] for name in state.tensors}
    assert goes_on_the_same(state.tensors) and not goes_on_the_same(wrong)


class Counting:
    """A task whose score is given in advance and whose only parameter counts the steps."""

    def __init__(self, scores: list[float]) -> None:
        self.module = nn.Linear(1, 1)
        self._scores = iter(scores)
        self.modes: list[bool] = []
        self.seen: list[float] = []

    def loss(self, blocks: Tensor) -> Tensor:
        assert self.module.training and torch.is_grad_enabled()
        return self.module(torch.ones(1, 1)).sum()

    def evaluate(self) -> Evaluation:
        torch.rand(3)  # a task that draws changes nothing
        assert not self.module.training and not torch.is_grad_enabled()
        self.seen.append(self.module.weight.item())
        score = next(self._scores)
        return Evaluation(score=score, figures={"accuracy": score}, summary=f"accuracy {score}")


@pytest.mark.parametrize(
    ("scores", "best"), [([1.0, 3.0, 2.0, 3.0], 20), ([4.0, 3.0, 2.0, 1.0], 10), ([-4.0, -3.0, -2.0, -1.0], 40)]
)
def test_the_highest_score_is_the_best_and_the_first_of_equals(scores: list[float], best: int) -> None:
    task = Counting(scores)
    before = torch.random.get_rng_state()
    report, last = train(task, "any", BLOCKS, settings())
    assert torch.equal(before, torch.random.get_rng_state())
    assert (report.best_step, report.steps) == (best, 40)
    assert report.figures == {"accuracy": scores[best // 10 - 1]}
    assert task.module.weight.item() == task.seen[best // 10 - 1]
    assert float(last["weight"]) == task.seen[-1]
    assert [point.step for point in report.curve] == [10, 20, 30, 40]


def test_an_early_end_counts_for_its_model_and_not_for_what_follows() -> None:
    states: list[TrainingState] = []
    report, _ = train(Counting([1.0, 9.0]), "any", BLOCKS, settings(), save=states.append, stop=at_step(15))
    assert (report.best_step, report.steps) == (15, 15)
    assert [found.step for found in states] == [10, 15]
    report, _ = train(Counting([2.0, 3.0, 2.0]), "any", BLOCKS, settings(), state=states[-1])
    assert [point.step for point in report.curve] == [10, 20, 30, 40] and report.best_step == 30


def test_estimating_changes_nothing() -> None:
    config = settings(dropout=0.3)
    task, before = task_of(config), torch.random.get_rng_state()
    assert estimate(task, config, 40).seconds > 0
    assert torch.equal(before, torch.random.get_rng_state())
    assert equal(weights_of(task), weights_of(task_of(config)))
    assert all(weight.grad is None for weight in task.module.parameters())


# The state on disk


def state_of_version(version: int, size: int = 1_000_000) -> TrainingState:
    return TrainingState(step=version, tensors={"w": torch.full((size,), float(version))}, values={"at": version})


def save_version(path: Path, folder: Path, module: Llama, version: int) -> None:
    """What a training does: the state, then the model folder."""
    save_state(path, state_of_version(version), {"version": version})
    with torch.no_grad(), run_folder.replacing(folder, {"version": version}) as new:
        for weight in module.parameters():
            weight.fill_(version)
        save_checkpoint(module, new, 0)


def save_for_ever(path: Path, folder: Path, first: int, saved: Event) -> None:
    module = model()
    for version in range(first, first + 1_000_000):
        save_version(path, folder, module, version)
        saved.set()


def test_killed_at_any_moment_what_is_on_disk_is_whole(tmp_path: Path) -> None:
    """30 children that save in a loop, each killed by SIGKILL at a random moment after its first time."""
    path, folder, chance, seen = tmp_path / "state", tmp_path / "model", random.Random(0), set[int]()
    save_version(path, folder, model(), 0)
    forking = multiprocessing.get_context("fork")
    for number in range(30):
        saved = forking.Event()
        child = forking.Process(target=save_for_ever, args=(path, folder, 10_000 * (number + 1), saved))
        child.start()
        assert child.pid is not None and saved.wait(60)
        time.sleep(chance.random() * 0.1)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        found = load_state(path)
        assert found is not None
        version = found[0].step
        assert found[1] == {"version": version} and found[0].values == {"at": version}
        assert torch.equal(found[0].tensors["w"], state_of_version(version).tensors["w"])
        recipe = run_folder.read_recipe(folder)
        assert recipe is not None
        weights = [weight.unique().tolist() for weight in load_checkpoint(folder).parameters()]
        assert all(values == [recipe["version"]] for values in weights)
        seen.add(version // 10_000)
    assert seen == set(range(1, 31))


def test_a_limit_on_file_size_says_so_and_leaves_the_old_state(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, state_of_version(1), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(SpecctlError, match=r"^cannot write .*state: File too large; free some space") as caught:
            save_state(path, state_of_version(2), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 1
    found = load_state(path)
    assert found is not None and found[0].step == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign"])
def test_a_broken_state_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state"
    assert load_state(path) is None
    save_state(path, state_of_version(1), {})
    content = path.read_bytes()
    path.write_bytes({"truncated": content[:-9], "empty": b"", "foreign": b"PK\x03\x04 a pickle"}[damage])
    with pytest.raises(UsageError, match=r"state is no state of a training .*--force") as caught:
        load_state(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_once_and_the_next_acts(number: signal.Signals) -> None:
    heard: list[int] = []
    before = {each: signal.signal(each, lambda *_: heard.append(1)) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with stop_signals() as stop:
            assert not stop()
            os.kill(os.getpid(), number)
            assert stop() and heard == []
            os.kill(os.getpid(), number)
            assert heard == [1]
        os.kill(os.getpid(), number)
        assert heard == [1, 1]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# The command line


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a signal arrive in the step with this index."""
    original = loop.learning_rate

    def plan(step: int | None, number: int = signal.SIGINT) -> None:
        sent: list[int] = []

        def interrupting(config: TrainingConfig, at: int) -> float:
            if at == step and not sent:
                sent.append(at)
                os.kill(os.getpid(), number)
            return original(config, at)

        monkeypatch.setattr(loop, "learning_rate", interrupting)

    return plan


OPTIONS = ("--set", "drafters.aligned.training.dropout=0.2", "--set", "drafters.aligned.training.eval_interval=5")
ALIGNED = ("train-draft", "--drafter", "aligned", *OPTIONS)


def report_of(run: Tiny, name: str = "drafters/aligned") -> dict[str, Any]:
    report: dict[str, Any] = run_folder.read_json(run.run_dir / name / "training.json")
    return {key: value for key, value in report.items() if key not in ("seconds", "path")}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def leftovers(run: Tiny) -> list[str]:
    return sorted(path.name for path in (run.run_dir / "drafters").iterdir() if path.name.startswith("."))


@pytest.mark.parametrize(("step", "number"), [(2, signal.SIGINT), (9, signal.SIGINT), (12, signal.SIGTERM)])
def test_resume_makes_what_one_go_makes(
    tiny: Tiny, tmp_path: Path, interrupt_at: Callable[..., None], step: int, number: int
) -> None:
    whole, parts = tiny.copy(tmp_path / "a"), tiny.copy(tmp_path / "b")
    assert whole.specctl(*ALIGNED).code == 0
    interrupt_at(step, number)
    answer = parts.specctl(*ALIGNED)
    assert answer.code == 130 and f"aligned: interrupted at step {step + 1} of 20" in answer.one_line
    assert "specctl train-draft --drafter aligned --resume (with the same -c and --set) goes on" in answer.one_line
    stored = report_of(parts)
    assert (stored["steps"], stored["interrupted"]) == (step + 1, True)
    folder = parts.run_dir / "drafters" / "aligned"
    assert state_path(folder).is_file()

    answer = parts.specctl("generate", "--drafter", "aligned", "--no-train", *OPTIONS)
    assert answer.code == 0
    assert f"aligned was interrupted at step {step + 1} of 20 and is used as it is" in answer.err
    assert "--resume (with the same -c and --set) goes on" in answer.err

    interrupt_at(None)
    answer = parts.specctl(*ALIGNED, "--resume")
    assert answer.code == 0 and f"going on with aligned at step {step + 1} of 20" in answer.err
    assert report_of(parts) == report_of(whole)
    expected = files_of(whole.run_dir / "drafters" / "aligned")
    found = files_of(folder)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name] and name != "training.json"] == []
    assert not state_path(folder).exists() and leftovers(parts) == []
    previous = run_folder.read_recipe(folder.with_name("aligned.previous"))
    assert previous is not None and previous["training"]["dropout"] == 0, "the interrupted model is no previous one"


def test_killed_training_goes_on_when_the_model_is_needed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tiny.copy(tmp_path / "a"), tiny.copy(tmp_path / "b")
    assert whole.specctl(*ALIGNED).code == 0
    folder = parts.run_dir / "drafters" / "aligned"
    shutil.rmtree(folder)

    def dying(path: Path, found: TrainingState, recipe: dict[str, Any]) -> None:
        save_state(path, found, recipe)
        if found.step == 10:
            raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "save_state", dying)
        with pytest.raises(MemoryError):
            parts.specctl(*ALIGNED)
    half = folder.with_name(f".{state_path(folder).name}.00.tmp")  # what a killed write leaves
    half.write_bytes(b"half")
    answer = parts.specctl("generate", "--drafter", "aligned", *OPTIONS)
    assert answer.code == 0 and "going on with aligned at step 10 of 20" in answer.err
    assert report_of(parts) == report_of(whole)
    assert not state_path(folder).exists() and leftovers(parts) == []


def test_resume_of_what_is_complete_or_never_began(tiny_copy: Tiny) -> None:
    before = files_of(tiny_copy.run_dir / "drafters" / "mismatched")
    answer = tiny_copy.specctl("train-mismatched", "--resume")
    assert answer.code == 0 and "mismatched is already complete, 20 steps: nothing to resume" in answer.err
    assert files_of(tiny_copy.run_dir / "drafters" / "mismatched") == before
    shutil.rmtree(tiny_copy.run_dir / "drafters" / "mismatched")
    answer = tiny_copy.specctl("train-mismatched", "--resume")
    assert answer.code == 0 and "mismatched has no training to resume; it begins" in answer.err
    assert report_of(tiny_copy, "drafters/mismatched")["steps"] == 20


@pytest.mark.parametrize("step", [None, 3])
def test_resume_with_another_config_is_refused_and_loses_nothing(
    tiny_copy: Tiny, interrupt_at: Callable[..., None], step: int | None
) -> None:
    interrupt_at(step)
    assert tiny_copy.specctl(*ALIGNED).code == (0 if step is None else 130)
    interrupt_at(None)
    before = files_of(tiny_copy.run_dir / "drafters")
    changes = ("--set", "drafters.aligned.training.steps=40", "--set", "drafters.aligned.training.dropout=0.1")
    answer = tiny_copy.specctl(*ALIGNED, "--resume", *changes)
    assert answer.code == 2
    assert "aligned cannot be resumed" in answer.one_line
    assert "training.dropout was 0.2, is 0.1; training.steps was 20, is 40" in answer.one_line
    assert files_of(tiny_copy.run_dir / "drafters") == before
    assert tiny_copy.specctl(*ALIGNED, "--resume").code == 0


def test_resume_and_force_are_refused_together(tiny: Tiny) -> None:
    answer = tiny.specctl("train-target", "--resume", "--force")
    assert answer.code == 2 and "--force" in answer.one_line and "--resume" in answer.one_line


def test_force_after_an_interruption_begins_anew(tiny_copy: Tiny, interrupt_at: Callable[..., None]) -> None:
    interrupt_at(12)
    assert tiny_copy.specctl(*ALIGNED).code == 130
    path = state_path(tiny_copy.run_dir / "drafters" / "aligned")
    path.write_bytes(b"broken")
    interrupt_at(None)
    assert "is no state of a training" in tiny_copy.specctl(*ALIGNED, "--resume").one_line
    answer = tiny_copy.specctl(*ALIGNED, "--force")
    assert answer.code == 0 and "training aligned (18,400 parameters, 20 steps" in answer.err
    assert not path.exists() and not report_of(tiny_copy)["interrupted"]


def test_a_lost_state_is_named(tiny_copy: Tiny, interrupt_at: Callable[..., None]) -> None:
    interrupt_at(2)
    assert tiny_copy.specctl(*ALIGNED).code == 130
    state_path(tiny_copy.run_dir / "drafters" / "aligned").unlink()
    answer = tiny_copy.specctl(*ALIGNED, "--resume")
    assert answer.code == 2 and "aligned.training.safetensors, is gone; use --force" in answer.one_line


def test_best_and_last_are_both_kept(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    original, scores = LanguageModelTask.evaluate, iter([3.0, 4.0, 2.0, 1.0])
    with monkeypatch.context() as patched:
        patched.setattr(LanguageModelTask, "evaluate", lambda task: replace(original(task), score=next(scores)))
        answer = tiny_copy.specctl(*ALIGNED)
    assert answer.code == 0
    folder, report = tiny_copy.run_dir / "drafters" / "aligned", report_of(tiny_copy)
    losses = {point["step"]: point["figures"]["validation_loss"] for point in report["curve"]}
    assert (report["best_step"], report["steps"]) == (10, 20)
    assert "the best checkpoint, of step 10, is in" in answer.err and "the last, of step 20" in answer.err
    held_out = Blocks(tiny_copy.artefacts().text.token_ids("code", "validation"), 16, "validation").spread(8)
    for place, step in ((folder, 10), (folder / "last", 20)):
        module = load_checkpoint(place)
        config = settings(batch_size=4)
        task = LanguageModelTask(module=module.eval(), held_out=held_out, config=config)
        assert task.evaluate().figures["validation_loss"] == pytest.approx(losses[step], rel=1e-5)
    assert report["own_validation_loss"] == losses[10]
    path = f"drafters.aligned.path={folder / 'last'}"
    assert tiny_copy.specctl("generate", "--drafter", "aligned", "--set", path).code == 0


def test_a_draft_of_an_interrupted_target_is_stale_once_the_target_is_done(
    tiny_copy: Tiny, interrupt_at: Callable[..., None]
) -> None:
    interrupt_at(2)
    assert tiny_copy.specctl("train-target", "--force").code == 130
    interrupt_at(None)
    artefacts = tiny_copy.artefacts()
    artefacts.draft("distilled")
    assert artefacts.was_trained("distilled") and not artefacts.was_trained("target")
    assert tiny_copy.specctl("train-target", "--resume").code == 0
    lines: list[str] = []
    artefacts = tiny_copy.artefacts(lines=lines)
    artefacts.draft("distilled")
    assert artefacts.was_trained("distilled")
    assert any("teacher.interrupted_at was 3, is None" in line for line in lines)


def test_a_full_disk_while_training_keeps_the_earlier_state(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[Path] = []
    original = state.write_atomic

    def filling(path: Path, data: bytes) -> None:
        writes.append(path)
        if len(writes) == 2:
            with run_folder.atomic_writer(path) as file:
                file.write(data[:100])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path, data)

    old = files_of(tiny_copy.run_dir / "drafters" / "aligned")
    with monkeypatch.context() as patched:
        patched.setattr(state, "write_atomic", filling)
        answer = tiny_copy.specctl(*ALIGNED)
    assert answer.code == 1 and "aligned.training.safetensors: No space left on device; free some" in answer.one_line
    folder = tiny_copy.run_dir / "drafters" / "aligned"
    assert files_of(folder) == old and leftovers(tiny_copy) == []
    found = load_state(state_path(folder))
    assert found is not None and found[0].step == 5
    answer = tiny_copy.specctl(*ALIGNED, "--resume")
    assert answer.code == 0 and "going on with aligned at step 5 of 20" in answer.err
    assert math.isfinite(report_of(tiny_copy)["validation_loss"])
