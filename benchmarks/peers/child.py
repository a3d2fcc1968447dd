"""A peer's process, seen from both sides: `Child` asks, `_serve` answers.

What a library prints goes into a log in the setting's folder, since stdout is for JSON.
"""

import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from time import sleep
from typing import Any

from benchmarks.contenders import Contender, Decode, Failed, Run
from benchmarks.peers import KINDS, Kind, Setting
from benchmarks.threads import fastest

_TIMED_TOKENS = 24  # of a request that is timed to choose threads


class Child:
    """A peer in a process of its own. Raises Failed where its library cannot load the models."""

    def __init__(self, name: str, kind: Kind, setting: Setting) -> None:
        self._settle_seconds, self._log = kind.settle_seconds, setting.folder / f"{name}.log"
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, kind.module, setting, self._log)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.modes: list[str] = self._answer()
        except Failed:
            self.close()
            raise

    def decode(
        self, mode: str, temperature: float, threads: int, prompt: list[int], num_new_tokens: int, request: int
    ) -> Run:
        """As `Peer.decode`; returns when the library's threads are asleep again."""
        with suppress(OSError):  # the answer says why
            self._connection.send((mode, temperature, threads, prompt, num_new_tokens, request))
        run: Run = self._answer()
        sleep(self._settle_seconds)
        return run

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            answer = Failed(f"its process ended with code {self._process.exitcode}{_last_line(self._log)}")
        if isinstance(answer, Failed):
            raise answer
        return answer


@contextmanager
def opened(names: Sequence[str], setting: Setting) -> Iterator[tuple[dict[str, Child], dict[str, str]]]:
    """The peers that run here, and why the others do not, both by name."""
    children: dict[str, Child] = {}
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        for name in names:
            reason = KINDS[name].why_not(setting.device)
            if reason is None:
                try:
                    children[name] = Child(name, KINDS[name], setting)
                    stack.callback(children[name].close)
                except Failed as failure:
                    reason = str(failure)
            if reason is not None:
                skipped[name] = reason
        yield children, skipped


def contenders_of(
    child: Child, temperatures: Sequence[float], counts: Sequence[int], prompt: list[int], num_new_tokens: int
) -> Iterator[Contender | tuple[str, str]]:
    """Each mode at each temperature with the threads that it is the fastest with; or its name and why it failed."""
    short = min(_TIMED_TOKENS, num_new_tokens)
    for mode in child.modes:

        def seconds_with(threads: int, mode: str = mode) -> float:
            runs = [child.decode(mode, temperatures[0], threads, prompt, short, 0) for _ in range(2)]
            return runs[-1].seconds / runs[-1].num_tokens  # the first warms up

        try:
            threads = fastest(counts, seconds_with)
        except Failed as failure:
            yield mode, str(failure)
            continue
        for temperature in temperatures:
            decode = _decode(child, mode, temperature, threads)
            yield Contender(name=mode, temperature=temperature, decode=decode, threads=threads)


def _decode(child: Child, mode: str, temperature: float, threads: int) -> Decode:
    def decode(prompt: list[int], num_new_tokens: int, request: int) -> Run:
        return child.decode(mode, temperature, threads, prompt, num_new_tokens, request)

    return decode


def _serve(connection: Connection, module: str, setting: Setting, log: Path) -> None:
    _print_into(log)
    try:
        peer = importlib.import_module(module).load(setting)
        connection.send(list(peer.modes))
    except Exception as error:
        connection.send(_failed(error))
        return
    while True:
        request = connection.recv()
        try:
            connection.send(peer.decode(*request))
        except Exception as error:
            connection.send(_failed(error))


def _print_into(log: Path) -> None:
    sys.stdout.flush()
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def _failed(error: Exception) -> Failed:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Failed(" ".join(lines)[:200] or type(error).__name__)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
    return f": {lines[-1][:200]}" if lines else ""
