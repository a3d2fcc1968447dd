"""CPU threads of each model, found by timing once a machine and kept beside the run.

What was chosen goes into every result. Timings are of this moment: delete `tuning.json` in the run folder
to take them anew, or set runtime.threads.
"""

import math
from contextlib import nullcontext
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
from specctl.models.kernel.decoder import KernelDecoder
from specctl.models.threads import torch_threads
from specctl.run_folder import fingerprint, read_json, write_json

_TIMED_TOKENS = (1, 5)  # a plain step, and a pass that verifies four drafts
_ROUNDS = 2
_TRIALS = 12
_CACHED_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """threads: of every pass of one model. engine: what runs it."""

    threads: int
    engine: str


class Tuner:
    """path: the file that keeps the choices. threads: as runtime.threads."""

    def __init__(self, path: Path, threads: int | Literal["auto"]) -> None:
        self._path, self._threads = path, threads
        self.chosen: dict[str, Tuning] = {}

    def tune(self, model: Model) -> None:
        """Give a model its threads. On a GPU there is nothing to choose."""
        if model.device.type != "cpu":
            return
        known, key = self._read(), self._key(model)
        threads = _read_threads(known.get(key))
        if threads is None:
            with torch_threads(1) if isinstance(model, KernelDecoder) else nullcontext():  # as in a round
                threads = _fastest(model, self._candidates(model))
            write_json(self._path, {**known, key: {"model": model.name, "engine": model.engine, "threads": threads}})
        model.threads = threads
        self.chosen[model.name] = Tuning(threads=threads, engine=model.engine)

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
        return fingerprint([model.engine, asdict(model.shape), str(model.dtype), self._threads, *machine])

    def _read(self) -> dict[str, Any]:
        try:
            found = read_json(self._path) if self._path.is_file() else {}
        except SpecctlError:  # broken, so everything is timed anew
            return {}
        return found if isinstance(found, dict) else {}


def _read_threads(entry: Any) -> int | None:
    """A kept choice, or None where there is none that fits."""
    threads = entry.get("threads") if isinstance(entry, dict) else None
    return threads if type(threads) is int and threads >= 1 else None


def _fastest(model: Model, candidates: list[int]) -> int:
    """The threads with which a plain step and a verifying pass together are the fastest.

    All choices are timed in turn, twice, so that a passing disturbance falls on more than one.
    """
    if len(candidates) == 1:
        return candidates[0]
    seconds = [math.inf] * len(candidates)
    for _ in range(_ROUNDS):
        for index, threads in enumerate(candidates):
            model.threads = threads
            seconds[index] = min(seconds[index], _seconds(model))
    return candidates[seconds.index(min(seconds))]


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
