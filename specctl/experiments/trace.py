"""A trace: one JSON line for each round, written as it happens.

Knows events and what a `Watch` saw; `docs/metrics.md` lists the fields.
"""

import contextlib
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from specctl import locks
from specctl.documents import TEXT_SUFFIXES
from specctl.errors import SpecctlError, UsageError
from specctl.events import Event, Round
from specctl.experiments.watch import Watch
from specctl.run_folder import to_text


class Trace:
    """Writes the rounds of requests that pass through it."""

    def __init__(self, file: FileIO, path: Path) -> None:
        self._file, self._path = file, path

    def follow(
        self, events: Iterable[Event], watch: Watch, *, prompt: int, drafter: str, k: int, lossy: bool = False
    ) -> Iterator[Event]:
        """The same events; each round is on disk before it is passed on.

        watch: the observer of those events. prompt: the index of the prompt.
        """
        for event in events:
            if isinstance(event, Round):
                asked = {"prompt": prompt, "drafter": drafter, "k": k, "lossy": lossy}
                self._write(asked, event, _rejection_entropy(event, watch))
            yield event

    def _write(self, asked: dict[str, Any], round_: Round, rejection_entropy: float | None) -> None:
        line = {
            **asked,
            "round": round_.index,
            "drafted": round_.drafted,
            "num_accepted": round_.num_accepted,
            "emitted": round_.emitted,
            "closing": round_.closing,
            "seconds": round_.seconds,
            "draft_seconds": round_.draft_seconds,
            "verify_seconds": round_.verify_seconds,
            "rejection_entropy": rejection_entropy,
        }
        try:
            self._file.write((to_text(line, indent=None) + "\n").encode("utf-8"))
        except OSError as error:
            raise SpecctlError(f"cannot write the trace {self._path}: {error.strerror or error}") from error


def _rejection_entropy(round_: Round, watch: Watch) -> float | None:
    """Entropy of the target's law where the round was cut short, nats; None unless it ended in a recovered token."""
    return watch.judged()[-1].entropy if round_.closing == "recovered" else None


@contextlib.contextmanager
def open_trace(path: Path | None) -> Iterator[Trace | None]:
    """A trace into a file that is made anew, None for no path.

    Raises UsageError where it cannot be written, and for a file that is there and no trace: it would be lost;
    SpecctlError where another process writes it.
    """
    if path is None:
        yield None
        return
    if path.suffix.lower() in set(TEXT_SUFFIXES) - {".jsonl"}:  # else a corpus could take it for text
        raise UsageError(f"--trace {path}: a trace is lines of JSON; name it .jsonl")
    if path.is_file() and path.stat().st_size and b'"rejection_entropy"' not in path.read_bytes()[:10_000]:
        raise UsageError(f"{path} is there and is no trace; choose another file for --trace, or remove it")
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "ab", buffering=0))
            if path.is_file():
                if not locks.take(file.fileno(), wait=False):
                    raise SpecctlError(f"another specctl command is writing the trace {path}; choose another file")
                file.truncate(0)
        except OSError as error:
            raise UsageError(
                f"cannot write the trace {path}: {error.strerror or error}; choose another file"
            ) from error
        yield Trace(file, path)
