"""Where results go: one writer for a file, pipes that are no files, and outputs that are never read as text."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny_run import Tiny

from specctl.errors import SpecctlError
from specctl.experiments.output_file import open_output, recipe_path
from specctl.experiments.trace import open_trace

LONGEST = 120  # seconds, of a process that does not do what is waited for


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("def one\ndef two\ndef three\n", encoding="utf-8")
    return path


def arguments_of(run: Tiny, *more: str) -> list[str]:
    return ["generate", "-c", str(run.config_path), "--set", f"run_dir={run.run_dir}", *more]


def in_shell(run: Tiny, ending: str, *more: str) -> subprocess.CompletedProcess[str]:
    """`specctl generate`, with what a shell puts around it: {} is the command."""
    words = " ".join(f"'{word}'" for word in [sys.executable, "-m", "specctl", *arguments_of(run, *more)])
    command = ["bash", "-c", ending.format(words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)


# Two at once


def test_a_second_writer_is_refused_by_name_and_loses_nothing(tiny: Tiny, tmp_path: Path, prompts: Path) -> None:
    output = tmp_path / "out.jsonl"
    with open_output(output):
        answer = tiny.specctl("generate", "--prompts", str(prompts), "--output", str(output))
        assert answer.code == 1 and f"another specctl command is writing {output}" in answer.one_line
    assert not output.exists(), "a file that got no line is gone again"
    assert tiny.specctl("generate", "--prompts", str(prompts), "--output", str(output)).code == 0
    lines = output.read_bytes()
    with open_output(output), pytest.raises(SpecctlError), open_output(output):
        pass
    assert output.read_bytes() == lines


def test_a_writer_that_died_blocks_nobody(tiny: Tiny, tmp_path: Path, prompts: Path) -> None:
    output = tmp_path / "out.jsonl"
    opening = "from specctl.experiments.output_file import open_output; from pathlib import Path; import sys, time\n"
    opening += "with open_output(Path(sys.argv[1])): print('open', flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", opening, str(output)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"open\n"
        with pytest.raises(SpecctlError, match="another specctl command is writing"), open_output(output):
            pass
        child.send_signal(signal.SIGKILL)
    assert tiny.specctl("generate", "--prompts", str(prompts), "--output", str(output)).code == 0
    assert len(output.read_bytes().splitlines()) == 3


def test_a_trace_that_is_being_written_is_not_emptied(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with open_trace(path):
        path.write_text('{"rejection_entropy": 1}\n')
        with pytest.raises(SpecctlError, match="another specctl command is writing the trace"), open_trace(path):
            pass
        assert path.stat().st_size
    with open_trace(path):
        assert not path.stat().st_size


# Pipes


def test_a_pipe_takes_lines_and_no_recipe_is_left_beside_it(tiny: Tiny, tmp_path: Path, prompts: Path) -> None:
    pipe, found = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.extend(pipe.read_text().splitlines()))
    reader.start()
    answer = tiny.specctl("generate", "--prompts", str(prompts), "--output", str(pipe))
    reader.join(LONGEST)
    assert answer.code == 0, answer.err
    assert [json.loads(line)["prompt"] for line in found] == ["def one", "def two", "def three"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "prompts.txt"]
    assert answer.out == "" and "done before" not in answer.err


@pytest.mark.parametrize("ending", ["{} | cat", "{} > {{}}; cat {{}}"])
def test_standard_output_takes_lines_alone(tiny: Tiny, tmp_path: Path, prompts: Path, ending: str) -> None:
    ending = ending.replace("{{}}", str(tmp_path / "all"))
    done = in_shell(tiny, ending, "--prompts", str(prompts), "--output", "/dev/stdout")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["def one", "def two", "def three"]
    assert not recipe_path(Path("/dev/stdout")).exists()


@pytest.mark.parametrize(
    "ending",
    [
        "cat {0} | {{}} --prompts /dev/stdin",
        "{{}} --prompts <(cat {0})",
        "mkfifo {0}.pipe; cat {0} > {0}.pipe & {{}} --prompts {0}.pipe",
    ],
)
def test_prompts_from_a_pipe_are_read_once(tiny: Tiny, prompts: Path, ending: str) -> None:
    done = in_shell(tiny, ending.format(prompts), "--json")
    assert done.returncode == 0, done.stderr
    assert [one["prompt"] for one in json.loads(done.stdout)["generations"]] == ["def one", "def two", "def three"]
