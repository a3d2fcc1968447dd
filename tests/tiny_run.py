"""A tiny run, and the command line run in this process: what tests of whole commands are written with."""

import contextlib
import io
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl import cli
from specctl.config import RunConfig
from specctl.config_file import load_config
from specctl.experiments.pair import Pair
from specctl.training.ensure import Artefacts

RUN_FILE = """
run_dir: {folder}/run
runtime: {{device: cpu, threads: 1}}
tokenizer: {{vocab_size: 300}}
corpora:
  code: {{paths: ["{folder}/code"], validation_fraction: 0.2}}
  prose: {{paths: ["{folder}/prose.txt"], validation_fraction: 0.2}}
target:
  corpus: code
  model: {{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1,
    intermediate_size: 96, head_dim: 32, max_position_embeddings: 64}}
  training: &short {{steps: 20, batch_size: 4, block_size: 16, learning_rate: 1e-2, eval_blocks: 8}}
drafters:
  aligned: {{corpus: code, training: *short, model: &narrow {{hidden_size: 32, num_hidden_layers: 1,
    num_attention_heads: 1, num_key_value_heads: 1, intermediate_size: 48, head_dim: 32, max_position_embeddings: 64}}}}
  distilled: {{corpus: code, model: *narrow,
    training: {{loss: kl, steps: 20, batch_size: 4, block_size: 16, learning_rate: 1e-2, eval_blocks: 8}}}}
  mismatched: {{corpus: prose, model: *narrow, training: *short}}
  medusa: {{kind: medusa, num_heads: 4, training: {{steps: 20, batch_size: 4, block_size: 16, eval_blocks: 8}}}}
decoding: {{max_new_tokens: 12, num_speculative_tokens: 3, prompt: "def "}}
sweep: {{k: [0, 1, 3], num_prompts: 2, prompt_tokens: 8, max_new_tokens: 12, repeats: 1}}
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command did: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document

    @property
    def one_line(self) -> str:
        """The error: exactly one line, without a traceback."""
        lines = [line for line in self.err.splitlines() if line.startswith("specctl: ")]
        assert len(lines) == 1 and self.err.rstrip().endswith(lines[0]) and "Traceback" not in self.err, self.err
        return lines[0]


@dataclass(frozen=True, slots=True)
class Tiny:
    """A run file and its folder."""

    config_path: Path
    run_dir: Path

    def config(self, *overrides: str) -> RunConfig:
        return load_config(self.config_path, [f"run_dir={self.run_dir}", *overrides])

    def artefacts(self, *overrides: str, lines: list[str] | None = None, may_train: bool = True) -> Artefacts:
        said = [] if lines is None else lines
        return Artefacts(self.config(*overrides), narrate=said.append, may_train=may_train)

    def pair(self, *overrides: str) -> Pair:
        return Pair(self.artefacts(*overrides))

    def copy(self, folder: Path) -> "Tiny":
        return Tiny(self.config_path, Path(shutil.copytree(self.run_dir, folder / "run copy é")))

    def specctl(self, command: str, *arguments: str) -> Answer:
        """Run a command in this process, with this run's config and folder."""
        return specctl(command, "-c", str(self.config_path), "--set", f"run_dir={self.run_dir}", *arguments)


def specctl(*arguments: str) -> Answer:
    """Run the command line in this process, as the installed script does."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["specctl", *arguments]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    finally:
        sys.argv = before
    return Answer(code, out.getvalue(), err.getvalue())


def write_run_file(folder: Path) -> Path:
    """A run file on text of its own: sources of the json package, and prose on other matters."""
    (folder / "code").mkdir(parents=True)
    for source in sorted(Path(json.__file__).parent.glob("*.py")):
        shutil.copy(source, folder / "code" / source.name)
    words = ["The", "river", "carried", "a", "boat", "past", "every", "quiet", "village", "until", "evening", "came."]
    prose = " ".join(words[(7 * i * i + 3 * i) % len(words)] for i in range(4000))
    (folder / "prose.txt").write_text(prose, encoding="utf-8")
    path = folder / "run.yaml"
    path.write_text(RUN_FILE.format(folder=folder), encoding="utf-8")
    return path
