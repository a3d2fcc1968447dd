"""What lets a training stop and go on: its state on disk, and the signals that ask it to stop.

A state is one safetensors file, with all that is not a tensor as JSON in the file's own header. It is
one file because one rename replaces it: a process killed at any moment leaves the old state or the
new one, whole. Knows nothing about what its tensors and values mean.
"""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specctl.errors import UsageError
from specctl.run_folder import to_text, write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """All that a training needs to go on as if it had never stopped.

    step: steps done. tensors: weights, optimizer moments, random states. values: JSON values.
    """

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


def state_path(folder: Path) -> Path:
    """Where the state lies of the training that will make the model `folder`: beside it."""
    return folder.with_name(f"{folder.name}.training.safetensors")


def save_state(path: Path, state: TrainingState, recipe: dict[str, Any]) -> None:
    """Write the state and the recipe of what is trained; SpecctlError where the disk refuses, the old one kept."""
    header = to_text({"recipe": recipe, "step": state.step, "values": state.values}, indent=None)
    write_atomic(path, save(state.tensors, metadata={"state": header}))


def load_state(path: Path) -> tuple[TrainingState, dict[str, Any]] | None:
    """The state and its recipe, None where there is none; UsageError, naming the file, where it is broken."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        state = TrainingState(step=int(header["step"]), tensors=tensors, values=dict(header["values"]))
        return state, dict(header["recipe"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no state of a training ({error}); --force trains anew") from None


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether SIGINT (Ctrl+C) or SIGTERM has arrived; a second one acts at once.

    So a step is never cut in half. Outside the main thread, which alone may catch signals, it is always False.
    """
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        restore()

    try:
        for number in numbers:
            signal.signal(number, note)
        yield lambda: bool(arrived)
    finally:
        restore()
