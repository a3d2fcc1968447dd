"""Ctrl+C: every command ends with one line on stderr that says what is kept, and exit code 130, wherever it arrives.

Real processes get a real signal once they have told, or shown, that they are at work.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Answer, Tiny, specctl

from specctl import cli
from specctl.cli.interrupts import interruptible, keep
from specctl.config_file import load_config
from specctl.errors import Interrupted

LONGEST = 120  # seconds, of a process that does not do what is waited for


@contextmanager
def started(*arguments: str, python: tuple[str, ...] = (), ignoring: bool = False) -> Iterator[subprocess.Popen[str]]:
    """`python -m specctl`, as a shell starts it in the foreground, or with SIGINT ignored as in the background."""
    disposition = signal.SIG_IGN if ignoring else signal.SIG_DFL
    process = subprocess.Popen(
        [sys.executable, *python, "-m", "specctl", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, disposition),  # else it is as pytest was started
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    """What the process says on stderr, up to a line with these words."""
    said = ""
    assert process.stderr is not None
    for line in process.stderr:
        said += line
        if words in line:
            return said
    raise AssertionError(f"it never said {words!r}: {said}")


def interrupt(process: subprocess.Popen[str], said: str = "") -> Answer:
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LONGEST)
    return Answer(process.returncode, out, said + err)


def wait_until(process: subprocess.Popen[str], true: Callable[[], bool]) -> None:
    started_at = time.monotonic()
    while not true():
        assert process.poll() is None and time.monotonic() - started_at < LONGEST
        time.sleep(0.01)


def fifo_opened(process: subprocess.Popen[str], path: Path) -> int:
    """The writing end of a named pipe, once the process has opened it to read."""
    found: list[int] = []

    def opened() -> bool:
        try:
            found.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # nobody reads yet
            return False
        return True

    wait_until(process, opened)
    return found[0]


@pytest.fixture
def run(tiny: Tiny, tmp_path: Path) -> Tiny:
    """A run of its own, with trained models as paths: each says that it is loaded."""
    shutil.copytree(tiny.run_dir, tmp_path / "models")
    return Tiny(tiny.config_path, tmp_path / "run")


def arguments_of(run: Tiny, *more: str) -> list[str]:
    settings = [f"run_dir={run.run_dir}", f"target.path={run.run_dir.parent / 'models' / 'target'}"]
    settings += [f"drafters.distilled.path={run.run_dir.parent / 'models' / 'drafters' / 'distilled'}"]
    return ["-c", str(run.config_path), *(word for setting in settings for word in ("--set", setting)), *more]


# What is loaded and then measured or generated


MEASUREMENT = "nothing of this measurement is kept, the models in {run_dir} are"


@pytest.mark.parametrize(
    ("command", "more", "kept"),
    [
        ("sweep-k", ("--set", "sweep.repeats=100000"), MEASUREMENT),
        ("break-it", ("--drafter", "distilled", "--set", "sweep.repeats=100000"), MEASUREMENT),
        (
            "verify",
            ("--drafter", "distilled", "--tokens", "1000000"),
            MEASUREMENT.replace("measurement", "verification"),
        ),
        ("generate", ("--prompts", "{prompts}", "--json"), MEASUREMENT.replace("measurement", "text")),
        (
            "generate",
            ("--prompts", "{prompts}", "--json", "--trace", "{run_dir}.jsonl"),
            MEASUREMENT.replace("measurement", "text") + "; the rounds so far are in {run_dir}.jsonl",
        ),
    ],
)
def test_what_a_command_without_its_end_leaves(run: Tiny, command: str, more: tuple[str, ...], kept: str) -> None:
    prompts = run.run_dir.with_name("prompts.txt")
    prompts.write_text("def \n" * 20_000, encoding="utf-8")
    names = {"prompts": prompts, "run_dir": run.run_dir}
    with started(command, *arguments_of(run, *(word.format(**names) for word in more))) as process:
        answer = interrupt(process, wait_for(process, "runs in the native decoder"))
    assert answer.code == 130 and answer.out == ""
    assert answer.one_line == f"specctl: interrupted; {kept.format(**names)}"
    assert not (run.run_dir / "results").exists()


def test_finished_lines_are_kept_and_counted(run: Tiny, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("def \n" * 20_000, encoding="utf-8")
    arguments = arguments_of(run, "--prompts", str(prompts), "--output", str(output))
    with started("generate", *arguments) as process:
        wait_until(process, lambda: output.is_file() and output.stat().st_size > 0)
        answer = interrupt(process)
    count = len(output.read_text(encoding="utf-8").splitlines())
    assert answer.code == 130
    assert answer.one_line == (
        f"specctl: interrupted: {count} of 20000 prompts are done in {output}; the same command goes on"
    )
    with started("generate", *arguments) as process:  # and once more, while the models are loaded
        answer = interrupt(process, wait_for(process, "runs in the native decoder"))
    assert (
        answer.code == 130 and str(output) in answer.one_line and answer.one_line.endswith("the same command goes on")
    )
    assert len(output.read_text(encoding="utf-8").splitlines()) >= count


@pytest.mark.parametrize("command", ["train-target", "train-draft", "train-mismatched", "train-medusa"])
def test_training(tiny_copy: Tiny, command: str) -> None:
    name = {"train-draft": "distilled"}.get(command, command.removeprefix("train-"))
    field = "target" if name == "target" else f"drafters.{name}"
    arguments = ["-c", str(tiny_copy.config_path), "--set", f"run_dir={tiny_copy.run_dir}"]
    with started(command, *arguments, "--set", f"{field}.training.steps=1000000") as process:
        answer = interrupt(process, wait_for(process, f"training {name} ("))
    assert answer.code == 130 and "interrupted" in answer.one_line and str(tiny_copy.run_dir) in answer.one_line


# What reads a run file


@pytest.mark.parametrize("command", [("config", "show"), ("inspect",), ("generate",), ("train-target",)])
def test_before_there_is_anything_to_keep(tmp_path: Path, command: tuple[str, ...]) -> None:
    config = tmp_path / "run.yaml"
    os.mkfifo(config)
    with started(*command, "-c", str(config)) as process:
        writer = fifo_opened(process, config)
        answer = interrupt(process)
        os.close(writer)
    assert (answer.code, answer.out, answer.err) == (130, "", "specctl: interrupted; nothing was saved\n")


def test_a_job_in_the_background_stays_there(tmp_path: Path, tiny: Tiny) -> None:
    """A shell without job control starts it with SIGINT ignored: Ctrl+C is not meant for it."""
    config = tmp_path / "run.yaml"
    os.mkfifo(config)
    with started("config", "show", "-c", str(config), ignoring=True) as process:
        writer = fifo_opened(process, config)
        process.send_signal(signal.SIGINT)
        os.write(writer, tiny.config_path.read_bytes())
        os.close(writer)
        out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, err) == (0, "")
    (tmp_path / "shown.yaml").write_text(out, encoding="utf-8")
    assert load_config(tmp_path / "shown.yaml") == load_config(tiny.config_path)


def test_while_it_imports(run: Tiny) -> None:
    """Python names each module that it has imported."""
    with started("generate", *arguments_of(run), python=("-X", "importtime")) as process:
        said = wait_for(process, " torch.")
        answer = interrupt(process, said)
    assert answer.code == 130 and answer.out == "" and "interrupted" in answer.one_line


PRESS = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        # Under -m Python ends by the signal where KeyboardInterrupt has passed through an exec(), as of dataclasses.
        (f"lambda: exec({PRESS!r})", 130, "specctl: interrupted; nothing was saved\n"),
        # When the command is done, and Python shuts down, it changes nothing.
        (f"lambda: atexit.register(lambda: {PRESS}) and sys.exit(3)", 3, ""),
    ],
    ids=["in exec", "at the end"],
)
def test_what_python_itself_does_with_the_signal(tmp_path: Path, command: str, code: int, says: str) -> None:
    module = "import atexit, os, signal, sys\nfrom specctl import cli\nfrom specctl.cli import commands\n"
    module += f"signal.signal(signal.SIGINT, signal.default_int_handler)\ncommands.app = {command}\ncli.main()\n"
    (tmp_path / "pressed.py").write_text(module)
    done = subprocess.run(
        [sys.executable, "-m", "pressed"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])},
        timeout=LONGEST,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, says)


# In this process


@pytest.fixture
def foreground() -> Iterator[None]:
    """SIGINT as Python has it in the foreground, however pytest was started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_error_that_came_of_it_is_no_other_error(foreground: None) -> None:
    def importing() -> None:
        """An import that clears away what it was interrupted by."""
        failed = False
        try:
            press()
        except KeyboardInterrupt:
            failed = True
        if failed:
            raise ImportError("initialization failed")

    with pytest.raises(Interrupted, match=r"^interrupted; nothing was saved$"), interruptible():
        importing()
    with pytest.raises(Interrupted, match=r"^interrupted; the file is kept$"), interruptible():
        keep("the file is kept")
        raise SystemExit(130) from KeyboardInterrupt()
    with pytest.raises(ImportError), interruptible():
        raise ImportError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_command_that_ended_well_did_so(foreground: None) -> None:
    def swallowing() -> None:
        with suppress(KeyboardInterrupt):
            press()

    with pytest.raises(SystemExit) as leaving, interruptible():
        swallowing()
        raise SystemExit(0)
    assert leaving.value.code == 0
    with interruptible():
        swallowing()


def test_handlers_of_others_are_left_alone(foreground: None) -> None:
    for handler in (signal.SIG_IGN, lambda number, frame: None):
        signal.signal(signal.SIGINT, handler)
        with interruptible():
            press()
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler


def interrupting(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


def test_a_text_that_is_cut_short_ends_its_line(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.experiments.pair.Pair.events", interrupting)
    for command in (("generate",), ("generate", "--set", "decoding.drafter=none")):
        answer = tiny.specctl(*command)
        assert (answer.code, answer.out) == (130, "def \n")
        kept = f"nothing of this text is kept, the models in {tiny.run_dir} are"
        assert answer.one_line == f"specctl: interrupted; {kept}"


def test_a_result_that_was_saved_is_named(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.report.layout.print_tables", interrupting)
    for command, *more in (("sweep-k",), ("break-it",), ("verify", "--tokens", "100")):
        answer = tiny_copy.specctl(command, "--drafter", "aligned", *more)
        path = tiny_copy.run_dir / "results" / f"{command}.json"
        assert answer.code == 130 and path.is_file()
        assert answer.one_line == f"specctl: interrupted; the result is in {path}"


def test_a_run_file_is_written_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.yaml"
    with monkeypatch.context() as patched:
        patched.setattr("specctl.config_starter.starter", interrupting)
        answer = specctl("config", "init", str(path))
    assert answer.code == 130 and answer.one_line == "specctl: interrupted; nothing was saved" and not path.exists()
    monkeypatch.setattr("specctl.cli.configs.narrate", interrupting)
    answer = specctl("config", "init", str(path))
    assert answer.code == 130 and answer.one_line == f"specctl: interrupted; {path} is written" and path.is_file()
    monkeypatch.setattr("specctl.config_file.json_schema", interrupting)
    answer = specctl("config", "schema")
    assert answer.code == 130 and answer.one_line == "specctl: interrupted; nothing was saved"
