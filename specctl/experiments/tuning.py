"""CPU threads and weight layouts of each model, found by timing once a machine and kept beside the run.

What was chosen goes into every result. Timings are of this moment: delete `tuning.json` in the run folder
to take them anew, or set runtime.threads.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch

from specctl.errors import SpecctlError
from specctl.hardware import describe_hardware, describe_versions, num_cores
from specctl.models.backend import Model
from specctl.models.compiled import CompiledLlama
from specctl.models.llama_decoder import LlamaDecoder
from specctl.models.matrix import BLOCKS
from specctl.run_folder import fingerprint, read_json, write_json

_TIMED_TOKENS = (1, 5)  # a plain step, and a pass that verifies four drafts
_ROUNDS = 2
_TRIALS = 12
_CACHED_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """threads: of every pass of one model. layouts: columns of a block for each kind of matrix, 0 for none."""

    threads: int
    layouts: dict[str, int]


class Tuner:
    """path: the file that keeps the choices. threads: as runtime.threads."""

    def __init__(self, path: Path, threads: int | Literal["auto"]) -> None:
        self._path, self._threads = path, threads
        self.chosen: dict[str, Tuning] = {}

    def tune(self, model: Model) -> None:
        """Give a model its threads and layouts. On a GPU there is nothing to choose."""
        if model.device.type != "cpu":
            return
        known, key = self._read(), self._key(model)
        tuning = _read_tuning(known.get(key), model)
        if tuning is None:
            tuning = _fastest(model, self._candidates(model))
            write_json(self._path, {**known, key: {"model": model.name, **asdict(tuning)}})
        _apply(tuning, model)
        self.chosen[model.name] = tuning

    def _candidates(self, model: Model) -> list[int]:
        if self._threads != "auto":
            return [self._threads]
        cores = num_cores()
        if isinstance(model, CompiledLlama):  # compiled anew for each number of threads, which takes too long
            return [cores]
        return sorted({1, max(1, cores // 2), cores})

    def _key(self, model: Model) -> str:
        """All that a choice depends on, but for what else the machine does."""
        machine = describe_hardware("cpu", 0), describe_versions()["torch"]
        return fingerprint([type(model).__name__, asdict(model.shape), str(model.dtype), self._threads, *machine])

    def _read(self) -> dict[str, Any]:
        try:
            found = read_json(self._path) if self._path.is_file() else {}
        except SpecctlError:  # broken, so everything is timed anew
            return {}
        return found if isinstance(found, dict) else {}


def _read_tuning(entry: Any, model: Model) -> Tuning | None:
    """A kept choice, or None where there is none that fits."""
    if not isinstance(entry, dict):
        return None
    threads, layouts = entry.get("threads"), entry.get("layouts")
    if type(threads) is not int or threads < 1 or not isinstance(layouts, dict):
        return None
    fits = layouts.keys() == _layouts(model).keys() and all(block in (0, *BLOCKS) for block in layouts.values())
    return Tuning(threads=threads, layouts=layouts) if fits else None


def _layouts(model: Model) -> dict[str, int]:
    return model.layouts() if isinstance(model, LlamaDecoder) else {}


def _fastest(model: Model, candidates: list[int]) -> Tuning:
    """The threads and layouts with which a plain step and a verifying pass together are the fastest.

    Whole passes are timed, since a matrix alone would lie in a nearer cache than it does in decoding; all
    choices in turn, twice, so that a passing disturbance falls on more than one.
    """
    layouts = model.possible_layouts() if isinstance(model, LlamaDecoder) else [{}]
    choices = [Tuning(threads=threads, layouts=layout) for threads in candidates for layout in layouts]
    if len(choices) == 1:
        return choices[0]
    seconds = [math.inf] * len(choices)
    for _ in range(_ROUNDS):
        for index, choice in enumerate(choices):
            _apply(choice, model)
            seconds[index] = min(seconds[index], _seconds(model))
    return choices[seconds.index(min(seconds))]


def _apply(tuning: Tuning, model: Model) -> None:
    model.threads = tuning.threads
    if isinstance(model, LlamaDecoder):
        model.lay_out(tuning.layouts)


def _seconds(model: Model) -> float:
    total, cached = 0.0, min(_CACHED_TOKENS, model.context_length - 1)
    session = model.session()
    session.extend(torch.zeros(1, cached, dtype=torch.int64))
    for count in _TIMED_TOKENS:
        times, ids = [], torch.zeros(1, min(count, model.context_length - cached), dtype=torch.int64)
        for _ in range(_TRIALS):
            started = perf_counter()
            session.extend(ids)
            times.append(perf_counter() - started)
            session.keep((cached,))
        total += median(times)
    return total
