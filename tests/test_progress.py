"""How far long work is: a bar on a terminal, a plain line now and then elsewhere, and everything long tells."""

import contextlib
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from tiny_run import Tiny

from specctl.cli import progress as module
from specctl.cli.progress import Lines, show_progress
from specctl.progress import Progress, Update
from specctl.training.ensure import Artefacts


class Clock:
    """A clock that stands until it is put on."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_line_where_a_while_has_passed() -> None:
    said, clock = list[str](), Clock()
    update = Lines("training target", "step", say=said.append, clock=clock)
    for step, note in ((1, ""), (2, "loss 2.0"), (3, "")):  # fast steps say nothing
        update(step, 4000, note)
    assert said == []
    clock.now += module.SECONDS_BETWEEN_LINES
    update(1500, 4000)
    update(1501, 4000)
    assert said == ["training target: 1,500 of 4,000 steps, loss 2.0"]
    for step in (1502, 1503):  # slow ones each have a line
        clock.now += 2 * module.SECONDS_BETWEEN_LINES
        update(step, 4000, f"loss {step}")
    assert said[1:] == [f"training target: {step:,} of 4,000 steps, loss {step}" for step in (1502, 1503)]


def test_lines_come_every_fifteen_to_thirty_seconds() -> None:
    assert 15 <= module.SECONDS_BETWEEN_LINES <= 30


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_and_a_pipe_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0)
    shown = {}
    for stream in (Terminal(), StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with show_progress("training target", "step") as update:
            update(1, 2)
            update(2, 2, "loss 2.0")
        shown[type(stream)] = stream.getvalue()
    assert "100%" in shown[Terminal] and "training target" in shown[Terminal] and "loss 2.0" in shown[Terminal]
    assert shown[StringIO] == "training target: 1 of 2 steps\ntraining target: 2 of 2 steps, loss 2.0\n"


class Recorder:
    """A `Progress` that keeps what it was told, by the work and its unit."""

    def __init__(self) -> None:
        self.told: dict[tuple[str, str], list[tuple[int, int]]] = {}

    @contextlib.contextmanager
    def __call__(self, what: str, unit: str) -> Iterator[Update]:
        steps = self.told[what, unit] = []

        def update(done: int, total: int, note: str = "") -> None:
            steps.append((done, total))

        yield update


def test_everything_long_in_a_training_tells(tiny: Tiny, tmp_path: Path) -> None:
    recorder = Recorder()
    progress: Progress = recorder
    config = Tiny(tiny.config_path, tmp_path / "run").config(
        "corpora.own={generated_by: target, num_tokens: 100}", "drafters.aligned.corpus=own"
    )
    Artefacts(config, narrate=lambda line: None, progress=progress).ensure("aligned")
    work = {"reading code": "character", "tokenising code": "character", "generating own": "token"}
    work |= {"training target": "step", "training aligned": "step"}
    assert {what: unit for what, unit in recorder.told} == work
    for (what, _), steps in recorder.told.items():
        assert steps == sorted(steps) and len({total for _, total in steps}) == 1, what
        done, total = steps[-1]
        assert done == total, what
    assert len(recorder.told["training target", "step"]) == 20
    assert len(recorder.told["generating own", "token"]) > 10  # within a part, too: one takes minutes with large models


@pytest.mark.parametrize(
    ("command", "arguments", "line"),
    [
        ("sweep-k", (), "sweep-k: 6 of 6 runs"),
        ("break-it", ("--drafter", "aligned"), "break-it: 4 of 4 runs"),
        ("verify", ("--tokens", "100", "--drafter", "aligned"), "verify: 100 of "),
        ("generate", ("--prompts", "prompts.txt", "--json"), "generate: 2 of 2 prompts"),
        ("generate", ("--prompts", "prompts.txt", "--output", "out.jsonl"), "generate: 2 of 2 prompts"),
        ("train-draft", ("--drafter", "aligned", "--force"), "training aligned: 20 of 20 steps, loss "),
    ],
)
def test_commands_tell_in_a_pipe(
    tiny_copy: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str], line: str
) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("def a\ndef b\n")
    answer = tiny_copy.specctl(command, *arguments)
    assert answer.code == 0 and any(said.startswith(line) for said in answer.err.splitlines()), answer.err
