"""What each command costs on a model of real size: seconds and peak memory of its process.

    python -m benchmarks.size [--path FOLDER] [--folder runs/size] [--only NAME ...]

Without a path it is a random Llama (`benchmarks.random_llama`), made once. Settings are small: what shows is what a
vocabulary, a checkpoint and a prompt of 8,000 tokens cost, not how well anything drafts. Seconds count the start of
the process. A table goes to stderr, JSON to stdout.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.random_llama import shape_of, write
from specctl.hardware import describe_hardware, describe_versions, num_cores
from specctl.report.layout import Column, Sheet, make_console, print_tables
from specctl.run_folder import to_text, write_atomic

RUN_FILE = """
run_dir: {folder}/run
runtime: {{device: cpu, dtype: bfloat16}}
corpora:
  code: {{builtin: python-stdlib}}
  prose: {{builtin: python-docs}}
  own: {{generated_by: target, num_tokens: 400}}
target: {{path: {path}, corpus: code}}
drafters:
  distilled: {{corpus: code, model: &small {{hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 2,
    num_key_value_heads: 1, intermediate_size: 384, max_position_embeddings: 8192}},
    training: {{loss: kl, steps: 4, batch_size: 4, block_size: 128, eval_blocks: 4}}}}
  own: {{corpus: own, model: *small,
    training: {{loss: acceptance, steps: 2, batch_size: 2, block_size: 16, eval_blocks: 1}}}}
  mismatched: {{corpus: prose, model: *small, training: {{steps: 4, batch_size: 4, block_size: 128, eval_blocks: 4}}}}
  medusa: {{kind: medusa, num_heads: 4, original_lm_head: true,
    training: {{steps: 2, batch_size: 2, block_size: 128, eval_blocks: 2}}}}
  ngram: {{kind: ngram}}
decoding: {{drafter: distilled, num_speculative_tokens: 4, max_new_tokens: 16, prompt: "def read_"}}
sweep: {{k: [0, 4], num_prompts: 2, prompt_tokens: 32, max_new_tokens: 12, repeats: 1, max_seconds: 2}}
"""

_LAW = ["top_p=0.9", "top_k=50", "min_p=0.02", "repetition_penalty=1.1"]
_SAMPLING = [part for setting in _LAW for part in ("--set", f"decoding.{setting}")]


def commands(folder: Path) -> dict[str, list[str]]:
    """Names to arguments, in an order in which each finds what it needs."""
    return {
        "inspect": ["inspect"],
        "train-draft": ["train-draft"],
        "train-mismatched": ["train-mismatched"],
        "train-draft, own text": ["train-draft", "--drafter", "own"],
        "train-medusa": ["train-medusa"],
        "generate": ["generate", "--show-rounds"],
        "generate, sampling": ["generate", *_SAMPLING],
        "generate, medusa": ["generate", "--drafter", "medusa"],
        "generate, greedy": ["generate", "--temperature", "0"],
        "generate, 8,000 tokens": ["generate", "--prompts", str(folder / "long.jsonl"), "--drafter", "ngram"],
        "generate, prompts": [
            "generate", "--prompts", str(folder / "prompts.jsonl"), "--output", str(folder / "output.jsonl"),
        ],
        "sweep-k": ["sweep-k"],
        "break-it": ["break-it", "--drafter", "distilled", "--drafter", "mismatched", "--drafter", "ngram"],
        "verify": ["verify", "--tokens", "200"],
    }  # fmt: skip


def measure(arguments: Sequence[str]) -> dict[str, Any]:
    """Run a command of specctl; its exit code, seconds and peak bytes, and its last line where it failed."""
    began = perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "specctl", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    peak = usage.ru_maxrss if sys.platform == "darwin" else usage.ru_maxrss * 1024
    last = (said.strip().splitlines() or [""])[-1]
    return {
        "exit_code": process.returncode,
        "seconds": perf_counter() - began,
        "peak_bytes": peak,
        "failure": last if process.returncode else None,
    }


def write_inputs(folder: Path, path: Path) -> None:
    """The run file, the prompts, and a long prompt: a function over and over, some 8,000 tokens less room to write."""
    from specctl.tokenizer import Tokenizer

    write_atomic(folder / "size.yaml", RUN_FILE.format(folder=folder, path=path).encode())
    line = "def add(first, second):\n    return first + second\n\n"
    per_line = len(Tokenizer.load(path).encode(line * 100)) / 100
    write_atomic(folder / "long.jsonl", to_text({"prompt": line * int(8000 / per_line)}, indent=None).encode())
    prompts = [to_text({"prompt": f"def read_{index}("}, indent=None) for index in range(3)]
    write_atomic(folder / "prompts.jsonl", ("\n".join(prompts) + "\n").encode())


def print_rows(rows: list[dict[str, Any]]) -> None:
    table: Sheet[dict[str, Any]] = Sheet(
        title="Commands at real size",
        columns=(
            Column("command", lambda row: row["name"], key=True, text=True),
            Column("seconds", lambda row: f"{row['seconds']:.0f}"),
            Column("peak GB", lambda row: f"{row['peak_bytes'] / 1e9:.2f}"),
            Column("exit code", lambda row: str(row["exit_code"])),
        ),
        rows=rows,
    )
    print_tables(make_console(stderr=True), table, wide=True)
    for row in rows:
        if row["failure"]:
            print(f"{row['name']}: {row['failure']}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="a checkpoint folder, instead of a random Llama")
    parser.add_argument("--folder", type=Path, default=Path("runs/size"))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="commands whose name begins so")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    path = options.path.absolute() if options.path else folder / "random"
    if not options.path and not (path / "tokenizer.json").is_file():
        write(path, shape_of(1024, 16, 152_064))
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder, path)
    rows = []
    for name, command in commands(folder).items():
        if options.only and not name.startswith(tuple(options.only)):
            continue
        rows.append({"name": name, **measure([*command, "-c", str(folder / "size.yaml")])})
        done = rows[-1]
        print(f"{name}: {done['seconds']:.0f} s, {done['peak_bytes'] / 1e9:.2f} GB", file=sys.stderr)
    print_rows(rows)
    result = {"path": str(path), "rows": rows}
    machine = {"hardware": describe_hardware("cpu", num_cores()), "versions": describe_versions()}
    print(to_text(result | machine))


if __name__ == "__main__":
    main()
