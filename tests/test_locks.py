"""One process at a time, whatever becomes of the others."""

import multiprocessing
import os
import signal
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import pytest

from specctl import locks

SPAWN = multiprocessing.get_context("spawn")
LONGEST = 120  # seconds, of what never comes


def unexpected() -> None:
    raise AssertionError("nobody holds it")


def hold(path: Path, held: Event, release: Event) -> None:
    with locks.alone(path, unexpected):
        held.set()
        release.wait(LONGEST)


def add_one(path: Path, count: Path, barrier: Barrier) -> None:
    """Read, and write one more, many times: what is not alone loses some."""
    barrier.wait(LONGEST)
    for _ in range(200):
        with locks.alone(path, lambda: None):
            count.write_text(str(int(count.read_text()) + 1))


def test_the_second_waits_and_is_told(tmp_path: Path) -> None:
    path, held, release = tmp_path / "new" / ".lock", SPAWN.Event(), SPAWN.Event()
    child = SPAWN.Process(target=hold, args=(path, held, release))
    child.start()
    assert held.wait(LONGEST)
    with locks.alone(path, release.set) as waited:
        assert waited
    with locks.alone(path, unexpected) as waited:
        assert not waited
    child.join()
    assert list(path.parent.iterdir()) == []


def test_a_process_that_died_blocks_nobody(tmp_path: Path) -> None:
    path, held, never = tmp_path / ".lock", SPAWN.Event(), SPAWN.Event()
    child = SPAWN.Process(target=hold, args=(path, held, never))
    child.start()
    assert held.wait(LONGEST)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert path.exists()
    with locks.alone(path, unexpected) as waited:
        assert not waited


def test_no_two_are_ever_in_at_once_though_the_file_comes_and_goes(tmp_path: Path) -> None:
    count, barrier = tmp_path / "count", SPAWN.Barrier(3)
    count.write_text("0")
    children = [SPAWN.Process(target=add_one, args=(tmp_path / ".lock", count, barrier)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert count.read_text() == "600"


def test_where_there_are_no_locks_nothing_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    with locks.alone(tmp_path / ".lock", unexpected) as waited, locks.alone(tmp_path / ".lock", unexpected):
        assert not waited
