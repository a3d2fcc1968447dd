"""`specctl config`, what editors and shells are told of run files, and `python -m specctl`."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_run import specctl

from specctl import __version__
from specctl.cli.configs import configs
from specctl.config import DRAFTER_KINDS, CorpusConfig, RunConfig, Section
from specctl.config_file import default_config_path, load_config
from specctl.config_starter import Text, starter

CONFIGS = default_config_path().parent
LONG = "One line of text that says a little, and not always quite the same: {}.\n"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A folder of 70,000 characters, with a name that is hard on YAML and shells."""
    folder = tmp_path / "my notes # 1: é 🙂's"
    folder.mkdir()
    for part in range(10):
        lines = (LONG.format((part * 97 + line * line) % 1009) for line in range(100))
        (folder / f"{part}.md").write_text("".join(lines), encoding="utf-8")
    return folder


# init


def test_init_writes_a_run_file_on_the_text(tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = tmp_path / "more.txt"
    shutil.copy(notes / "3.md", more)
    answer = specctl("config", "init", "new folder/mine é.yaml", "--text", notes.name, "--text", "more.txt")
    assert (answer.code, answer.out) == (0, ""), answer.err
    assert "new folder/mine é.yaml" in answer.err and "11 documents" in answer.err
    config = load_config(tmp_path / "new folder" / "mine é.yaml")
    assert config.run_dir == "runs/mine é"
    assert config.target.corpus is not None
    assert config.corpora[config.target.corpus].paths == (str(notes), str(more))
    assert list(config.drafters) == ["aligned", "distilled", "mismatched", "ngram"]
    assert config.drafters["distilled"].training.loss == "kl" and config.drafters["ngram"].kind == "ngram"
    aligned, mismatched = config.drafters["aligned"], config.drafters["mismatched"]
    assert (aligned.model, aligned.training) == (mismatched.model, mismatched.training)
    assert mismatched.corpus and config.corpora[mismatched.corpus].builtin == "python-docs"
    assert config.decoding.prompt == "One line of"


def test_what_init_says_next_runs(tmp_path: Path, notes: Path) -> None:
    path = tmp_path / "my run.yaml"
    answer = specctl("config", "init", str(path), "--text", str(notes))
    commands = [shlex.split(line) for line in answer.err.splitlines() if line.startswith("  specctl ")]
    assert [command[1] for command in commands] == ["sweep-k", "break-it"]
    short = ["sweep={k: [0, 1], num_prompts: 1, repeats: 1, max_new_tokens: 4, prompt_tokens: 4}"]
    short += ["target.model.num_hidden_layers=2", "target.training.eval_blocks=2"]
    short += [f"run_dir={tmp_path}/run", "runtime={device: cpu, threads: 1}", "target.training.steps=2"]
    short += [f"drafters.{name}.training.steps=2" for name in ("aligned", "distilled", "mismatched")]
    short += ["decoding.num_speculative_tokens=1"]
    for _, command, *arguments in commands:
        if "--plot" in arguments:
            arguments[arguments.index("--plot") + 1] = str(tmp_path / "sweep.png")
        done = specctl(command, *arguments, *(word for setting in short for word in ("--set", setting)))
        assert done.code == 0, done.err
    assert "ngram" in done.out and "mismatched" in done.out


def test_init_without_text_takes_what_python_has(tmp_path: Path) -> None:
    answer = specctl("config", "init", str(tmp_path / "a.yaml"))
    assert answer.code == 0 and "--text" in answer.err
    config = load_config(tmp_path / "a.yaml")
    tiny = load_config(default_config_path())
    assert config.corpora["text"].builtin == "python-stdlib" and config.run_dir == "runs/a"
    assert config.target.model == tiny.target.model and config.target.training == tiny.target.training
    for name in ("aligned", "distilled", "mismatched"):
        assert config.drafters[name].model == tiny.drafters[name].model
        assert config.drafters[name].training == tiny.drafters[name].training


def test_init_overwrites_only_when_told(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("mine", encoding="utf-8")
    answer = specctl("config", "init", str(path))
    assert answer.code == 2 and "exists; --force overwrites it" in answer.one_line
    assert path.read_text(encoding="utf-8") == "mine"
    assert specctl("config", "init", str(path), "--force").code == 0
    load_config(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nowhere", "nowhere does not exist"),
        ("empty", "holds no text files"),
        ("short.txt", "12 characters of text are too little to train on"),
        ("bytes.txt", "is not UTF-8"),
    ],
)
def test_init_refuses_text_that_cannot_be_trained_on(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("a short text", encoding="utf-8")
    (tmp_path / "bytes.txt").write_bytes(b"\xff" * 30_000)
    answer = specctl("config", "init", str(tmp_path / "a.yaml"), "--text", str(tmp_path / text))
    assert answer.code == 2 and says in answer.one_line
    assert not (tmp_path / "a.yaml").exists()


def test_init_refuses_a_folder_and_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    answer = specctl("config", "init", str(tmp_path))
    assert answer.code == 2 and "is a folder; give the name of the file to write" in answer.one_line
    (tmp_path / "file").write_bytes(b"")
    answer = specctl("config", "init", str(tmp_path / "file" / "a.yaml"))
    assert answer.code == 1 and "cannot write" in answer.one_line


def test_sizes_grow_with_the_text(tmp_path: Path) -> None:
    seen = []
    for num_characters in (50_000, 200_000, 1_000_000, 50_000_000):
        text = Text(
            paths=("/a",), num_documents=1, num_characters=num_characters, validation_fraction=0.1, beginning="a"
        )
        path = tmp_path / "a.yaml"
        path.write_text(starter("a", text), encoding="utf-8")
        config = load_config(path)
        seen.append((config.tokenizer.vocab_size, config.target.training.steps))
        tokens = config.target.training.steps * config.target.training.batch_size * config.target.training.block_size
        assert tokens < 12 * num_characters / 2, "the text would be read more than about 12 times"
    assert seen == sorted(seen) and len(set(seen)) == 4


# help


@pytest.mark.parametrize("command", [command.name for command in configs.registered_commands])
def test_help_ends_with_an_example_that_runs(
    command: str, tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notes.rename("notes")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text("more\n", encoding="utf-8")
    (tmp_path / "configs").symlink_to(CONFIGS)
    _, found, example = specctl("config", command, "--help").out.rpartition("Example: specctl ")
    assert found
    answer = specctl(*shlex.split(example))
    assert answer.code == 0, answer.err


# show


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("seed=7", "drafters.lookup={kind: ngram, prompt_lookup_max: 3}", "sweep.k=[0, 2]"),
        ("decoding.prompt='1e-4'", "target.training.learning_rate=1e-9"),
        ("decoding.prompt='yes'", r'decoding.stop=["\n\n", "null", "é 🙂: # x", " "]'),
        (f"decoding.prompt={'a b ' * 100}", r'corpora.mine.paths=["C:\\notes", "a\tb", "\x7f"]'),
    ],
)
def test_show_loads_again_to_the_same(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    arguments = [word for override in overrides for word in ("--set", override)]
    answer = specctl("config", "show", *arguments)
    assert (answer.code, answer.err) == (0, "")
    path = tmp_path / "shown.yaml"
    path.write_text(answer.out, encoding="utf-8")
    wanted = load_config(default_config_path(), overrides)
    assert load_config(path) == wanted
    again = specctl("config", "show", "-c", str(path))
    assert again.out == answer.out
    assert specctl("config", "show", *arguments, "--json").json == wanted.model_dump(mode="json")


def test_show_has_every_field_in_order() -> None:
    config = load_config(default_config_path())
    for tree in (specctl("config", "show", "--json").json, yaml.safe_load(specctl("config", "show").out)):
        assert list(tree) == list(RunConfig.model_fields)
        for name in ("runtime", "tokenizer", "target", "decoding", "sweep"):
            assert list(tree[name]) == list(type(getattr(config, name)).model_fields)
        assert list(tree["target"]["training"]) == list(type(config.target.training).model_fields)
        assert list(tree["corpora"]["code"]) == list(CorpusConfig.model_fields)
        for drafter in tree["drafters"].values():
            assert list(drafter) == list(DRAFTER_KINDS[drafter["kind"]].model_fields)


def test_show_tells_mistakes_as_any_command() -> None:
    answer = specctl("config", "show", "--set", "sed=1")
    assert answer.code == 2 and "did you mean 'seed'?" in answer.err and answer.out == ""
    assert specctl("config", "show", "-c", "no.yaml").code == 2


# schema


def test_shipped_schema_is_the_codes() -> None:
    """Made by `specctl config schema > configs/specctl.schema.json`."""
    assert (CONFIGS / "specctl.schema.json").read_text(encoding="utf-8") == specctl("config", "schema").out


def mistakes(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """The parts of JSON schema that ours uses, checked."""
    root = json.loads((CONFIGS / "specctl.schema.json").read_text(encoding="utf-8"))
    if "$ref" in schema:
        return mistakes(value, root["$defs"][schema["$ref"].rpartition("/")[2]], path)
    if "anyOf" in schema or "oneOf" in schema:
        tries = [mistakes(value, choice, path) for choice in schema.get("anyOf", schema.get("oneOf"))]
        return [] if [] in tries else min(tries, key=len)
    if "type" not in schema:  # an enumeration of more than one
        return [] if value in schema["enum"] else [f"{path}: not one of {schema['enum']}"]
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    kinds |= {"integer": int, "number": (int, float)}
    found = [] if isinstance(value, kinds[schema["type"]]) else [f"{path}: not {schema['type']}"]
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        found.append(f"{path}: not allowed")
    if isinstance(value, list) and not found:
        found += [line for item in value for line in mistakes(item, schema["items"], path)]
    if isinstance(value, dict) and not found:
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{path}.{name}: needed" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            part = known.get(name, others)
            found += [f"{path}.{name}: unknown"] if part is False else mistakes(item, part, f"{path}.{name}")
    return found


def test_schema_accepts_run_files_and_refuses_mistakes(tmp_path: Path, notes: Path) -> None:
    schema = json.loads((CONFIGS / "specctl.schema.json").read_text(encoding="utf-8"))
    specctl("config", "init", str(tmp_path / "a.yaml"), "--text", str(notes))
    for path in [*CONFIGS.glob("*.yaml"), tmp_path / "a.yaml"]:
        assert mistakes(yaml.safe_load(path.read_text(encoding="utf-8")), schema) == [], path
    assert mistakes(specctl("config", "show", "--json").json, schema) == []
    assert mistakes({"target": {"corpus": "a"}, "sed": 1}, schema) == [".sed: unknown"]
    assert mistakes({"target": {"training": {"stepz": 1}}}, schema) == [".target.training.stepz: unknown"]
    assert mistakes({"target": {}, "drafters": {"a": {"kind": "magic"}}}, schema) == [".drafters.a.kind: not allowed"]
    assert mistakes({"target": {}, "seed": "one"}, schema) == [".seed: not integer"]
    assert mistakes({}, schema) == [".target: needed"]


def test_schema_says_what_the_fields_are() -> None:
    schema = specctl("config", "schema").json
    for section in (RunConfig, *Section.__subclasses__()):
        properties = (schema if section is RunConfig else schema["$defs"][section.__name__])["properties"]
        assert list(properties) == list(section.model_fields)
        for name, field in section.model_fields.items():
            assert field.description == properties[name].get("description"), name
            assert field.is_required() or "default" in properties[name], name


def test_run_files_tell_editors_where_the_schema_is(tmp_path: Path) -> None:
    mark = "# yaml-language-server: $schema="
    for path in CONFIGS.glob("*.yaml"):
        header, *_ = path.read_text(encoding="utf-8").splitlines()
        assert header.startswith(mark) and (CONFIGS / header.removeprefix(mark)).is_file(), path
    specctl("config", "init", str(tmp_path / "a.yaml"))
    header, *_ = (tmp_path / "a.yaml").read_text(encoding="utf-8").splitlines()
    assert header == mark + (CONFIGS / "specctl.schema.json").resolve().as_uri()


# Shells


def completed(line: str, folder: Path, code: str = "pass") -> list[str]:
    """What bash is offered at the end of a line."""
    words = shlex.split(line)
    position = len(words) - (not line.endswith(" "))
    environment = {"_SPECCTL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(position)}
    program = f"import sys\nsys.argv = ['specctl']\nfrom specctl.cli import main\ntry: main()\nfinally: {code}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
        timeout=60,
        check=False,
    )
    assert done.stderr == "", done.stderr
    return done.stdout.split()


def test_completion_of_commands_options_and_files(tmp_path: Path) -> None:
    assert completed("specctl swe", tmp_path) == ["sweep-k"]
    assert {"generate", "config", "break-it"} <= set(completed("specctl ", tmp_path))
    assert completed("specctl config s", tmp_path) == ["show", "schema"]
    assert "--drafter" in completed("specctl generate --dr", tmp_path)
    assert completed("specctl generate -c ", tmp_path) == []  # no answer: the shell completes files


def test_completion_of_drafters(tmp_path: Path) -> None:
    tiny = [*load_config(default_config_path()).drafters, "none"]
    (tmp_path / "a.yaml").write_text("drafters: {small: {}, other: {}}\nsed: 1", encoding="utf-8")
    assert completed("specctl generate --drafter ", tmp_path) == tiny
    assert completed("specctl sweep-k -c a.yaml --drafter ", tmp_path) == ["small", "other", "none"]
    assert completed("specctl train-draft --force --config a.yaml --drafter o", tmp_path) == ["other"]


@pytest.mark.parametrize("content", [None, b"", b"- 1", b"drafters: 3", b"drafters: [", b"\xff", b"drafters:"])
def test_completion_never_fails(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.yaml").write_bytes(content)
    assert completed("specctl generate -c a.yaml --drafter ", tmp_path) == ["none"]


def test_completion_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert completed("specctl generate --drafter no", tmp_path, code) == ["none", "[]"]


def test_python_m_specctl(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "specctl", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"specctl {__version__}\n"
