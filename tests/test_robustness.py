"""Odd names, links that go in circles, and files that were edited by hand: done right, or one line."""

import glob
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Answer, Tiny

from specctl.config import DraftModelConfig
from specctl.config_file import load_config
from specctl.config_starter import measure_text
from specctl.documents import text_files
from specctl.errors import UsageError

RUN_FILE = """
corpora: {text: {paths: [text.txt]}}
target: {corpus: text, path: ~/models/target}
run_dir: ~/runs
drafters: {small: {path: "~/models/draft"}}
decoding: {drafter: small, prompt: "~ is a path"}
"""


def load(folder: Path, text: str) -> Any:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return load_config(folder / "run.yaml")


def test_the_home_folder_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load(tmp_path, RUN_FILE)
    draft = config.drafters["small"]
    assert isinstance(draft, DraftModelConfig)
    assert (config.run_dir, config.target.path) == ("/home/someone/runs", "/home/someone/models/target")
    assert draft.path == "/home/someone/models/draft" and config.decoding.prompt == "~ is a path"


def test_merge_keys_bring_what_is_not_written_beside_them(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
corpora: {text: {paths: [text.txt]}}
target: {corpus: text, training: &long {steps: 50, batch_size: 2}}
drafters:
  small: {training: {<<: *long, steps: 7}}
decoding: {drafter: small}
""",
    )
    assert (config.drafters["small"].training.steps, config.drafters["small"].training.batch_size) == (7, 2)
    with pytest.raises(UsageError, match="line 4: duplicate key 'steps'"):
        load(
            tmp_path,
            """
target: &t {corpus: text}
drafters:
  small: {<<: *t, steps: 7, steps: 8}
""",
        )


# Patterns


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a.txt", "b.md", "sub/c.txt", "sub/deep/d.txt", ".hidden/e.txt", "sub/.f.txt", "s[1]/g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path.resolve()


@pytest.mark.parametrize(
    "pattern",
    ["**/*.txt", "*", "*/*", "**", "sub/**", "**/deep/*.txt", "[ab].*", "s*/**/*.txt", ".h*/*", "**/.f*", "*/../b.md"],
)
def test_patterns_mean_what_glob_says(tree: Path, pattern: str) -> None:
    expected: set[Path] = set()
    for match in map(Path, glob.glob(str(tree / pattern), recursive=True)):
        expected |= set(text_files([str(match)])) if match.is_dir() else {match.resolve()}
    assert set(text_files([str(tree / pattern)])) == expected and expected


def test_links_that_go_in_circles_end(tree: Path) -> None:
    for name in ("one", "two"):  # together they would make a path for every sequence of ones and twos
        (tree / "sub" / name).symlink_to(tree)
    assert text_files([str(tree / "**" / "*.txt")]) == [
        tree / name for name in ("a.txt", "s[1]/g.txt", "sub/c.txt", "sub/deep/d.txt")
    ]


@pytest.mark.parametrize(
    ("pattern", "leaves"),  # whether it follows a link out of the folder
    [
        *(("", False), ("**", True), ("**/*", True)),
        *(("*/" * 35 + "*", True), ("*/**/" * 30 + "*.txt", True), ("**/" * 60 + "*.txt", False)),
    ],
)
def test_each_folder_is_read_once_whatever_links_lead_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, leaves: bool
) -> None:
    """With two links to the folder itself a pattern of 35 parts has 2 ** 35 paths to the same few files."""
    real, elsewhere = tmp_path / "real", tmp_path / "elsewhere"
    files = [elsewhere / "f.txt", real / "f.txt", real / "sub" / "f.txt"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("text")
    for name in ("one", "two"):
        (real / name).symlink_to(".")
        (real / "sub" / name).symlink_to("..")
    (real / "other").symlink_to(elsewhere)
    listed, walk = Counter[str](), os.walk

    def counting(top: Path, onerror: Any = None) -> Iterator[tuple[str, list[str], list[str]]]:
        for parent, subfolders, names in walk(top, onerror=onerror):
            yield parent, subfolders, names
            listed[parent] += onerror is not None and bool(subfolders)  # looked for files in, and gone on from

    monkeypatch.setattr("os.walk", counting)
    found = text_files([str(real / pattern)])
    assert sorted(found) == files[not leaves :]
    if pattern in ("**", "**/*"):
        assert found == [files[1], files[2], files[0]]  # by the names below the folder: f.txt, one, other
    assert max(listed.values(), default=0) <= 1


def test_a_link_to_itself_is_no_file(tree: Path) -> None:
    (tree / "loop.txt").symlink_to("loop.txt")
    (tree / "there.txt").symlink_to("back.txt")
    (tree / "back.txt").symlink_to("there.txt")
    assert not [path for path in text_files([str(tree)]) if path.stem in ("loop", "there", "back")]
    for given, says in (
        ("loop.txt", "does not exist"),
        ("l*.txt", "loop.txt is not a file"),
        ("loop.txt/*", "matches"),
    ):
        with pytest.raises(UsageError, match=says):
            text_files([str(tree / given)])


def test_a_working_directory_that_looks_like_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "notes [2026]"
    folder.mkdir()
    for name in ("one.txt", "two.txt"):
        (folder / name).write_text(f"Some text of {name}. " * 2000)
    monkeypatch.chdir(folder)
    text = measure_text(["*.txt"])
    monkeypatch.chdir(tmp_path)
    assert [path.name for path in text_files(text.paths)] == ["one.txt", "two.txt"]


# Files of a run


def write_prompts(folder: Path) -> Path:
    path = folder / "prompts.txt"
    path.write_text("def one\ndef two\n", encoding="utf-8")
    return path


def generate(tiny: Tiny, folder: Path, output: Path) -> Answer:
    return tiny.specctl("generate", "--prompts", str(write_prompts(folder)), "--output", str(output))


def test_an_output_whose_name_is_not_text(tiny: Tiny, tmp_path: Path) -> None:
    answer = generate(tiny, tmp_path, tmp_path / os.fsdecode(b"out\xff.jsonl"))
    assert answer.code == 2 and "its name is not UTF-8" in answer.one_line


@pytest.mark.parametrize(
    "change",
    [
        {"category": ["x"]},
        {"category": 3},
        {"id": [1]},
        {"id": None},
        {"stats": []},
        {"stats": None},
        {"seconds": "1"},
        {"seconds": None},
        {"seconds": float("nan")},
        {"num_new_tokens": 10**400},
        {"num_rounds": -1},
        [1],
        "text",
        None,
    ],
    ids=repr,
)
def test_a_line_that_was_edited(tiny: Tiny, tmp_path: Path, change: Any) -> None:
    output = tmp_path / "out.jsonl"
    assert generate(tiny, tmp_path, output).code == 0
    first, second = output.read_text(encoding="utf-8").splitlines()
    line = json.loads(first)
    if isinstance(change, dict):
        for name, value in change.items():
            (line if name in line else line["stats"])[name] = value
    else:
        line = change
    output.write_text(f"{json.dumps(line)}\n{second}\n", encoding="utf-8")
    answer = generate(tiny, tmp_path, output)
    assert answer.code == 2 and "line 1 was changed since it was written" in answer.one_line


@pytest.mark.parametrize("content", ["[]", "null", "3", '"x"', "{", "[" * 100_000], ids=lambda content: content[:3])
def test_a_recipe_that_was_edited(tiny_copy: Tiny, tmp_path: Path, content: str) -> None:
    output = tmp_path / "out.jsonl"
    assert generate(tiny_copy, tmp_path, output).code == 0
    recipe = output.with_name("out.jsonl.recipe.json")
    for path in (recipe, tiny_copy.run_dir / "target" / "recipe.json", tiny_copy.run_dir / "tokens/code.survey.json"):
        before = path.read_bytes()
        path.write_text(content)
        answer = generate(tiny_copy, tmp_path, output)
        assert answer.code == 2 and path.name in answer.one_line
        path.write_bytes(before)


@pytest.mark.parametrize("survey", [None, [], {}, {"fingerprint": 3}, "all"])
def test_a_survey_that_was_edited(tiny_copy: Tiny, survey: Any) -> None:
    path = tiny_copy.run_dir / "tokens" / "code.survey.json"
    known = json.loads(path.read_text())
    known["survey"] = {**known["survey"], "num_characters": "many"} if survey == "all" else survey
    path.write_text(json.dumps(known))
    answer = tiny_copy.specctl("generate")
    assert answer.code == 2 and "code.survey.json was changed" in answer.one_line


@pytest.mark.parametrize("report", [[], {"interrupted": True}, {"interrupted": True, "steps": "5"}])
def test_a_report_that_was_edited(tiny_copy: Tiny, report: Any) -> None:
    (tiny_copy.run_dir / "target" / "training.json").write_text(json.dumps(report))
    answer = tiny_copy.specctl("generate")
    assert answer.code == 2 and "training.json" in answer.one_line
