"""The command line: results on stdout, narration on stderr, a mistake is one line and an exit code."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Answer, Tiny, specctl

from specctl import __version__
from specctl.cli.commands import app
from specctl.tokenizer import Tokenizer

COMMON = {"schema_version", "config", "seed", "hardware", "tuning", "versions"}
GENERATE = {"text", "token_ids", "finish_reason", "drafter", "k", "temperature", "stats", "lossy", "logprobs"}
STATS = {
    *("num_new_tokens", "num_rounds", "num_drafted", "num_accepted", "acceptance_rate", "conditional_acceptance"),
    *("mean_acceptance_length", "tokens_per_second", "end_to_end_tokens_per_second", "seconds", "prompt_seconds"),
}
SWEEP = {
    *("drafter", "temperature", "rows", "best_k", "undecided", "margin", "num_repeats", "cost_ratio", "verify_cost"),
    *("overhead", "conditional_acceptance", "disturbance", "ignores_eos", "note", "lossy", "conclusions"),
}
INTERVALS = {
    *("speedup_interval", "mean_acceptance_length_interval", "by_category", "by_prompt"),
    *("predicted_speedup", "predicted_interval", "prediction_agrees"),
}
SWEEP_ROW = {
    *("k", "tokens_per_second", "spread", "speedup", "acceptance_rate", "mean_acceptance_length"),
    *("num_repeats", "is_fresh"),
    *INTERVALS,
}
BREAK_ROW = {
    *("name", "tokens_per_second", "spread", "speedup", "acceptance_rate", "expected_acceptance"),
    *("conditional_acceptance", "acceptance_by_entropy"),
    *("mean_acceptance_length", "cost_ratio", "round_cost", "break_even_alpha", "cause", "pays"),
    *INTERVALS,
}
TRAIN = {"name", "num_parameters", "train_loss", "validation_loss", "tokens", "seconds", "path"}
COMMANDS = ("train-target", "train-draft", "train-mismatched", "train-medusa", "generate", "sweep-k", "break-it")


def in_shell(line: str, **environment: str) -> Answer:
    """Run a shell line in which `specctl` is this project's, away from any terminal."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    setup = f'specctl() {{ {shlex.quote(sys.executable)} -c "from specctl.cli import main; main()" "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", setup + line], capture_output=True, env={**inherited, **environment}, timeout=120, check=False
    )
    return Answer(done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8"))


# The JSON contract


@pytest.mark.parametrize("command", COMMANDS)
def test_json_alone_on_stdout_and_the_same_in_the_run_folder(tiny: Tiny, command: str) -> None:
    answer = tiny.specctl(command, "--json", "--set", "seed=3")
    assert answer.code == 0, answer.err
    document = answer.json  # the whole of stdout is one JSON value
    assert document.keys() >= COMMON
    assert (document["schema_version"], document["seed"], document["config"]["seed"]) == (1, 3, 3)
    assert document["config"]["run_dir"] == str(tiny.run_dir)
    assert document["versions"]["specctl"] == __version__ and document["hardware"]["cores"] >= 1
    name = "train-distilled" if command == "train-draft" else command
    stored = json.loads((tiny.run_dir / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert stored == document
    assert answer.err.strip(), "nothing was narrated"


def test_results_name_the_paths_that_drew_and_judged(tiny: Tiny) -> None:
    for command in ("generate", "sweep-k", "break-it"):
        assert tiny.specctl(command, "--json").json["paths"]


def test_generate_fields(tiny: Tiny) -> None:
    document = tiny.specctl("generate", "--json").json
    assert document.keys() - COMMON - {"paths"} == GENERATE
    assert document["stats"].keys() >= STATS
    assert (document["drafter"], document["k"], document["temperature"]) == ("distilled", 3, 1.0)
    assert document["finish_reason"] in ("eos", "length")
    assert document["stats"]["num_new_tokens"] == len(document["token_ids"])
    assert document["text"] == Tokenizer.load(tiny.run_dir / "target").decode(document["token_ids"])


def test_sweep_fields(tiny: Tiny) -> None:
    document = tiny.specctl("sweep-k", "--json").json
    assert document.keys() - COMMON - {"paths"} == SWEEP
    assert all(row.keys() == SWEEP_ROW for row in document["rows"])
    plain = document["rows"][0]
    assert (plain["k"], plain["speedup"], plain["acceptance_rate"]) == (0, 1.0, None)
    assert set(document["verify_cost"]) == {"1", "2", "4"}
    assert document["best_k"] in (0, 1, 3, None) and document["conclusions"][0].startswith(("Best K = ", "Undecided "))
    assert (document["best_k"] is None) == (len(document["undecided"]) == 2)


def test_break_it_fields(tiny: Tiny) -> None:
    document = tiny.specctl("break-it", "--json", "--k", "2").json
    others = {"k", "temperature", "rows", "note", "lossy", "disturbance", "ignores_eos", "conclusions"}
    assert document.keys() - COMMON - {"paths"} == others
    assert document["k"] == 2
    assert [row["name"] for row in document["rows"]] == ["baseline", "aligned", "distilled", "mismatched", "medusa"]
    assert all(row.keys() == BREAK_ROW for row in document["rows"])
    # Two prompts give no interval, so nothing is said to pay or not. The cause is a matter of times.
    assert [(row["pays"], row["speedup_interval"]) for row in document["rows"]] == [(None, None)] * 5
    assert document["rows"][0]["cause"] is None
    assert all(row["cause"] in ("agreement", "draft cost") for row in document["rows"][1:])
    assert sum("no interval from so few prompts" in line for line in document["conclusions"]) == 4


def test_train_fields(tiny: Tiny) -> None:
    for command, name in (("train-target", "target"), ("train-mismatched", "mismatched")):
        document = tiny.specctl(command, "--json").json
        assert document.keys() >= TRAIN | COMMON
        assert document["name"] == name and document["tokens"] == 20 * 4 * 16
        assert document["num_parameters"] == (80960 if name == "target" else 18400)


# What people read


def test_generate_text_is_the_prompt_and_the_json_text(tiny: Tiny) -> None:
    shown, stored = tiny.specctl("generate"), tiny.specctl("generate", "--json")
    assert shown.code == stored.code == 0
    assert shown.out == "def " + stored.json["text"] + "\n"
    assert "tokens/s" in shown.err and "saved " in shown.err


def test_seed_reproduces_in_this_process_and_in_another(tiny: Tiny) -> None:
    def ids(*arguments: str) -> list[int]:
        found: list[int] = tiny.specctl("generate", "--json", *arguments).json["token_ids"]
        return found

    assert ids("--seed", "1") == ids("--seed", "1")
    assert ids("--seed", "1") != ids("--seed", "2")
    assert ids() == ids("--seed", "0")
    arguments = f"-c {tiny.config_path} --set run_dir={tiny.run_dir}"
    assert in_shell(f"specctl generate --json --seed 1 {arguments}").json["token_ids"] == ids("--seed", "1")


@pytest.mark.parametrize("arguments", [("--drafter", "none"), ("--k", "0")])
def test_plain_decoding(tiny: Tiny, arguments: tuple[str, ...]) -> None:
    document = tiny.specctl("generate", "--json", *arguments).json
    assert (document["drafter"], document["k"]) == ("none", 0)
    assert document["stats"]["num_drafted"] == 0 and document["stats"]["acceptance_rate"] is None
    assert document["stats"]["num_rounds"] == document["stats"]["num_new_tokens"]
    assert "plain decoding" in tiny.specctl("generate", *arguments).err


def test_greedy_is_the_same_with_and_without_drafts(tiny: Tiny) -> None:
    outputs = {tiny.specctl("generate", "--temperature", "0", "--k", str(k)).out for k in range(4)}
    assert len(outputs) == 1


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_small_budgets(tiny: Tiny, budget: int) -> None:
    answer = tiny.specctl("generate", "--json", "--set", f"decoding.max_new_tokens={budget}")
    assert answer.code == 0 and len(answer.json["token_ids"]) == budget
    assert answer.json["finish_reason"] == "length"
    assert tiny.specctl("generate", "--set", f"decoding.max_new_tokens={budget}").code == 0


@pytest.mark.parametrize("prompt", ["x", "   ", "\n", "naïve café 🙂 漢字 é", "\" of 'x' , y\"", "--k", "1e-4", "[x"])
def test_prompts_survive(tiny: Tiny, prompt: str) -> None:
    answer = tiny.specctl("generate", f"--prompt={prompt}")
    assert answer.code == 0, answer.err
    assert answer.out.startswith(prompt)


def test_show_rounds_marks_kinds_without_colour_in_a_pipe(tiny: Tiny) -> None:
    plain, marked = tiny.specctl("generate"), tiny.specctl("generate", "--show-rounds")
    assert marked.code == 0 and "\x1b" not in marked.out
    num_rounds = tiny.specctl("generate", "--json").json["stats"]["num_rounds"]
    _, legend, text = marked.out.partition("\n")[0], *marked.out.split("\n", 1)
    assert "~recovered" in legend and "+bonus" in legend
    assert text.count("|") >= num_rounds
    assert re.sub(r"[|~+]", "", text) == re.sub(r"[|~+]", "", plain.out)


def test_training_shows_a_table_of_all_models(tiny: Tiny) -> None:
    answer = tiny.specctl("train-target")
    assert all(name in answer.out for name in ("target", "aligned", "distilled", "mismatched", "80,960", "18,400"))
    assert "already trained" in answer.err


def test_missing_models_are_trained_and_said(tiny: Tiny, tmp_path: Path) -> None:
    fresh = Tiny(tiny.config_path, tmp_path / "fresh")
    answer = fresh.specctl("generate", "--json", "--drafter", "aligned")
    assert answer.code == 0 and len(answer.json["token_ids"]) == 12
    for what in ("training a tokenizer", "tokenising code", "training target", "training aligned", "about"):
        assert what in answer.err
    assert "distilled" not in answer.err


def test_pipe_has_no_escape_codes_and_no_cut_numbers(tiny: Tiny) -> None:
    arguments = f"-c {tiny.config_path} --set run_dir={tiny.run_dir}"
    answer = in_shell(f"set -o pipefail; specctl sweep-k {arguments} | cat", COLUMNS="40", TERM="xterm-256color")
    assert answer.code == 0, answer.err
    assert "\x1b" not in answer.out + answer.err
    assert "…" not in answer.out
    stored = json.loads((tiny.run_dir / "results" / "sweep-k.json").read_text(encoding="utf-8"))
    lines = answer.out.splitlines()
    for row in stored["rows"]:
        cells = [f"{row['tokens_per_second']:.0f}", f"{row['speedup']:.2f}x", f"{row['predicted_speedup']:.2f}x"]
        assert any(all(re.search(rf"(?<![\d.]){re.escape(cell)}(?![\d.])", line) for cell in cells) for line in lines)
    assert " ".join(" ".join(lines).split()).endswith(" ".join(stored["conclusions"]))


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "xyz " * 80), "the context holds 64"),
        (("--drafter", "alined"), "specctl: --drafter: no drafter is named 'alined'; did you mean 'aligned'?"),
        (("--k", "-1"), "specctl: --k: input should be greater than or equal to 0, not -1"),
        (("--k", "99"), "specctl: --k: input should be less than or equal to 60, not 99"),
        (("--temperature", "-1"), "specctl: --temperature: input should be greater than or equal to 0, not -1"),
        (("--temperature", "nan"), "specctl: --temperature: input should be a finite number, not nan"),
        (("--seed", "-1"), "specctl: --seed: input should be greater than or equal to 0, not -1"),
        (("--rule", "x"), "specctl: --rule: input should be 'token', 'block' or 'typical', not 'x'"),
        (("--set", "runtime.device=gpu"), "runtime.device: 'gpu' is not a device"),
        (("--set", "runtime.device=cuda:99"), "runtime.device: 'cuda:99' is not available"),
        (("--set", "runtime.device=meta"), "runtime.device: 'meta' is not available"),
        (("--set", "runtime.dtype=float8"), "runtime.dtype"),
        (
            ("--set", "decoding.temprature=1"),
            "specctl: --set decoding.temprature: unknown key; did you mean 'temperature'?",
        ),
        (("--set", "temperature"), "write it as section.field=value"),
    ],
)
def test_mistakes_are_usage_errors(tiny: Tiny, arguments: tuple[str, ...], says: str) -> None:
    answer = tiny.specctl("generate", *arguments)
    assert answer.code == 2
    assert says in answer.err and answer.err.startswith("specctl: ")
    assert answer.out == "" and "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("prompt", "says"), [("", "is empty"), ("xyz " * 80, "the context holds 64"), ("\udcff", "not valid UTF-8")]
)
def test_a_prompt_that_will_not_do_is_named_before_a_model_is_trained(
    tiny: Tiny, tmp_path: Path, prompt: str, says: str
) -> None:
    fresh = Tiny(tiny.config_path, tmp_path / "fresh")
    answer = fresh.specctl("generate", "--prompt", prompt)
    assert answer.code == 2 and says in answer.one_line and not (fresh.run_dir / "target").exists()


def test_each_wrong_flag_has_a_line(tiny: Tiny) -> None:
    answer = tiny.specctl("sweep-k", "--temperature", "-1", "--seed", "-1", "--rule", "x", "--drafter", "nope")
    assert answer.code == 2
    lines = sorted(line.removeprefix("specctl: ").partition(":")[0] for line in answer.err.splitlines())
    assert lines == ["--drafter", "--rule", "--seed", "--temperature"]


def test_break_it_knows_its_drafters_before_any_work(tiny: Tiny, tmp_path: Path) -> None:
    fresh = Tiny(tiny.config_path, tmp_path / "fresh")
    answer = fresh.specctl("break-it", "--drafter", "alined", "--drafter", "distilled")
    assert answer.code == 2 and not fresh.run_dir.exists()
    assert answer.err == "specctl: --drafter: no drafter is named 'alined'; did you mean 'aligned'?\n"


def test_cuda_without_a_gpu(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    answer = tiny.specctl("generate", "--set", "runtime.device=cuda")
    assert answer.code == 2 and "'cuda' is not available on this machine" in answer.one_line
    assert tiny.specctl("generate", "--set", "runtime.device=auto").code == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes_work(tiny: Tiny, dtype: str) -> None:
    answer = tiny.specctl("generate", "--json", "--set", f"runtime.dtype={dtype}")
    assert answer.code == 0 and len(answer.json["token_ids"]) == 12


@pytest.mark.parametrize("command", COMMANDS)
def test_unwritable_run_folder_is_found_before_any_work(tiny: Tiny, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    answer = Tiny(tiny.config_path, tmp_path / "file" / "run").specctl(command)
    assert answer.code == 2
    assert "cannot write in folder" in answer.one_line and "run_dir" in answer.one_line
    assert answer.err.strip() == answer.one_line, "something was done before"


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("sweep-k", ("--drafter", "none"), "sweep-k needs a drafter"),
        ("break-it", ("--k", "0"), "break-it needs"),
        ("train-draft", ("--drafter", "none"), "no drafter is named 'none'"),
        ("sweep-k", ("--set", "sweep.prompt_tokens=60", "--set", "sweep.k=[63]"), "sweep.k"),
        ("sweep-k", ("--set", "sweep.prompt_tokens=64"), "the context holds 64"),
        ("sweep-k", ("--set", "sweep.prompt_tokens=100000"), "lower sweep.prompt_tokens"),
    ],
)
def test_commands_refuse_what_they_cannot_do(tiny: Tiny, command: str, arguments: tuple[str, ...], says: str) -> None:
    answer = tiny.specctl(command, *arguments)
    assert answer.code == 2, answer
    assert says in answer.err and "Traceback" not in answer.err and answer.out == ""


def test_no_mismatched_drafter(tiny: Tiny) -> None:
    answer = tiny.specctl("train-mismatched", "--set", "drafters={distilled: {}}")
    assert answer.code == 2 and "no drafter is named 'mismatched'" in answer.one_line


def test_missing_config_and_unknown_flags(tmp_path: Path) -> None:
    answer = specctl("generate", "-c", str(tmp_path / "no.yaml"))
    assert answer.code == 2 and "no.yaml does not exist" in answer.one_line
    for arguments in (("generate", "--promt", "x"), ("generat",), ("generate", "--k", "many")):
        answer = specctl(*arguments)
        assert answer.code == 2 and answer.out == "" and "Traceback" not in answer.err


def test_interrupt_outside_training(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupting(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("specctl.experiments.pair.Pair.events", interrupting)
    answer = tiny.specctl("sweep-k")
    assert answer.code == 130 and "Traceback" not in answer.err


# Help


def examples() -> list[list[str]]:
    """The arguments of each command's example, as its help prints it."""
    found = []
    for command in app.registered_commands:
        assert command.epilog and command.epilog.startswith("Example: specctl "), command.name
        found.append(shlex.split(command.epilog.removeprefix("Example: specctl ")))
    return found


@pytest.mark.parametrize("example", examples(), ids=lambda example: example[0])
def test_help_ends_with_an_example_that_runs(tiny: Tiny, example: list[str]) -> None:
    command, *arguments = example
    shown = specctl(command, "--help")
    assert shown.code == 0
    assert " ".join(shown.out.split()).endswith(cli_epilog(command))
    if "-c" in arguments:  # the example's config is the big one: the tiny run stands in
        at = arguments.index("-c")
        assert (Path(__file__).parent.parent / arguments[at + 1]).is_file()
        del arguments[at : at + 2]
    assert tiny.specctl(command, *arguments).code == 0


def cli_epilog(name: str) -> str:
    (epilog,) = [command.epilog for command in app.registered_commands if command.name == name]
    assert epilog
    return epilog


def test_every_command_is_tested_here() -> None:
    elsewhere = {"verify", "inspect"}  # tested in files of their own
    assert {command.name for command in app.registered_commands} == {*COMMANDS, *elsewhere}


def test_version() -> None:
    assert specctl("--version").out == f"specctl {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['specctl', '--help']\nfrom specctl.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    print([name for name in ('torch', 'numpy', 'transformers', 'matplotlib', 'pydantic') "
        "if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "sweep-k" in done.stdout
    assert done.stderr.strip() == "[]"


def test_c_locale_and_odd_text(tiny: Tiny) -> None:
    arguments = f"-c {tiny.config_path} --set run_dir={tiny.run_dir}"
    answer = in_shell(f"specctl generate --prompt 'é🙂' {arguments}", LC_ALL="C")
    assert answer.code == 0 and answer.out.startswith("é🙂")
    answer = in_shell(f"specctl generate --prompt 'é🙂' {arguments}", PYTHONIOENCODING="ascii")
    assert answer.code == 0 and answer.out.startswith(r"\xe9\U0001f642")
    answer = tiny.specctl("generate", "--prompt", "\udcff")  # how Python passes on a byte that is not UTF-8
    assert answer.code == 2 and "not valid UTF-8" in answer.one_line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_behind_stdout_is_one_line(tiny: Tiny) -> None:
    arguments = f"-c {tiny.config_path} --set run_dir={tiny.run_dir}"
    for command in ("sweep-k --json", "generate"):
        answer = in_shell(f"specctl {command} {arguments} > /dev/full")
        assert answer.code == 1 and "No space left" in answer.err and "Traceback" not in answer.err, answer.err
