"""From a training to its folder: the state while it lasts, the best and the last checkpoint at its end.

The folder holds the best checkpoint, and in `last/` the last one where that is another; training.json
says the steps of both. Until the training is done its state lies beside the folder. Knows nothing about
what is trained: a task, and a function that writes its module, say that.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specctl import run_folder
from specctl.config import TrainingConfig
from specctl.errors import Interrupted, UsageError
from specctl.progress import Progress
from specctl.training.blocks import Blocks
from specctl.training.loop import Task, TrainingReport, load_weights, train
from specctl.training.state import TrainingState, load_state, save_state, state_path, stop_signals

REPORT = "training.json"


def train_into(
    folder: Path,
    recipe: dict[str, Any],
    task: Task,
    name: str,
    blocks: Blocks,
    config: TrainingConfig,
    *,
    state: TrainingState | None,
    write: Callable[[Path], None],
    describe: Callable[[TrainingReport], dict[str, Any]],
    narrate: Callable[[str], None],
    resume_command: str,
    progress: Progress,
) -> None:
    """Train, or go on from `state`, and put the model in its place; the one that stood there is kept as previous.

    write: writes the task's module, as it is at the call, into a folder. describe: what the stored report says
    beside `TrainingReport`.
    Raises Interrupted after SIGINT or SIGTERM, when state and model are saved as they were.
    """

    def save(state: TrainingState) -> None:
        save_state(state_path(folder), state, recipe)

    with stop_signals() as stop:
        report, last = train(task, name, blocks, config, state=state, save=save, stop=stop, progress=progress)
        details = {**describe(report), **asdict(report)}
        began_here = run_folder.read_recipe(folder) == recipe and interrupted_at(folder) is not None
        with run_folder.replacing(folder, recipe, keep_previous=not began_here) as new:
            write(new)
            if report.best_step != report.steps:
                load_weights(task.module, last)
                write(new / "last")
            run_folder.write_json(new / REPORT, details)
        if report.best_step != report.steps:
            narrate(
                f"{name}: the best checkpoint, of step {report.best_step:,}, is in {folder}; "
                f"the last, of step {report.steps:,}, in {folder / 'last'}"
            )
        if report.interrupted:
            raise Interrupted(
                f"{name}: interrupted at step {report.steps:,} of {config.steps:,}; its state is saved, and the model "
                f"as it was is in {folder} and will be used; {resume_command} goes on"
            )
        run_folder.remove(state_path(folder))
        if stop():
            raise Interrupted(f"interrupted; {name} is trained and lies in {folder}")


def read_report(folder: Path) -> dict[str, Any]:
    """What the training that made `folder` reported; UsageError, naming the file, where it is missing or broken."""
    return run_folder.read_object(folder / REPORT)


def interrupted_at(folder: Path) -> int | None:
    """The step at which the training that made `folder` was interrupted, None where it was not."""
    report = read_report(folder) if (folder / REPORT).is_file() else {}
    if not report.get("interrupted"):
        return None
    steps = report.get("steps")
    if type(steps) is not int:
        raise UsageError(
            f"{folder / REPORT}: its steps are {steps!r}; it was changed since it was written; use --force"
        )
    return steps


def unfinished(folder: Path, recipe: dict[str, Any]) -> TrainingState | None:
    """The state of an unfinished training of `folder` by this very recipe, None where there is none."""
    found = load_state(state_path(folder))
    return found[0] if found and not run_folder.differences(found[1], recipe) else None


def refuse_changes(folder: Path, recipe: dict[str, Any], name: str) -> None:
    """Raises UsageError, naming the fields, where what is to be resumed began by another recipe."""
    state = load_state(state_path(folder))
    found = state[1] if state else run_folder.read_recipe(folder)
    changes = run_folder.differences(found, recipe) if found else []
    if changes:
        raise UsageError(
            f"{name} cannot be resumed, its config has changed ({'; '.join(changes)}); change it back, "
            "or train anew without --resume"
        )
