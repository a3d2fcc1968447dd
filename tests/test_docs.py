"""The documents are held to the code: commands, options, paths and links exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from specctl.cli.commands import app
from specctl.config_file import load_config

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"^```[^\n]*\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def specctl_lines() -> list[tuple[str, str]]:
    """(document, line) for every line of a code block that runs specctl."""
    found = []
    for path in DOCUMENTS:
        for block in code_blocks(path):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"^\s*\$ ", "", line.strip())
                if re.match(r"(\.venv/bin/)?specctl ", line):
                    found.append((path.name, line))
    return found


def problem(line: str) -> str | None:
    """What a specctl command line asks for that does not exist."""
    program, *words = shlex.split(line, comments=True)
    words = words[: next((at for at, word in enumerate(words) if word in ("|", ">", "&&", ";")), len(words))]
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    if words and words[0].startswith("-"):
        known = {name for parameter in group.params for name in parameter.opts} | {"--help"}
        return None if words[0] in known else f"{program} has no {words[0]}"
    command: Any = group
    while words and not words[0].startswith("-") and hasattr(command, "commands"):
        name = words.pop(0)
        command = command.commands.get(name)
        if command is None:
            return f"no command {name}"
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    unknown = [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
    if unknown:
        return f"{command.name} has no {unknown[0]}"
    files = [words[at + 1] for at, word in enumerate(words) if word in ("-c", "--config")]
    missing = [file for file in files if file.startswith("configs/") and not (ROOT / file).is_file()]
    return f"{missing[0]} does not exist" if missing else None


@pytest.mark.parametrize("name_and_line", specctl_lines(), ids=lambda pair: f"{pair[0]}: {pair[1]}")
def test_commands_in_documents_exist(name_and_line: tuple[str, str]) -> None:
    assert problem(name_and_line[1]) is None


def test_wrong_commands_are_caught() -> None:
    assert problem("specctl sweep-k --json | cat  # a comment") is None
    assert problem("specctl --version") is None
    assert problem("specctl sweep") == "no command sweep"
    assert problem("specctl config init a.yaml --txt b") == "init has no --txt"
    assert problem("specctl config int a.yaml") == "no command int"
    assert problem("specctl config") is None and problem("specctl config --help") is None
    assert problem("specctl generate --promt x") == "generate has no --promt"
    assert problem("specctl generate -c configs/none.yaml") == "configs/none.yaml does not exist"


def test_readme_shows_every_command() -> None:
    shown = {line.split()[1] for name, line in specctl_lines() if name == "README.md" and len(line.split()) > 1}
    assert {command.name for command in app.registered_commands} <= shown


def tree_paths() -> set[str]:
    """The paths in README's tree: a code block that starts with `specctl/`, two or more spaces a level.

    A folder's files may stand below it or in the words beside it.
    """
    (block,) = [block for block in code_blocks(README) if block.startswith("specctl/")]
    paths: set[str] = set()
    parents: list[tuple[int, str]] = []
    for line in block.splitlines():
        match = re.match(r"([\s│├└─|`-]*)([\w.][\w./-]*)", line)
        if match is None:
            continue
        depth, name = len(match[1]), match[2]
        while parents and parents[-1][0] >= depth:
            parents.pop()
        path = (parents[-1][1] if parents else "") + name
        if name.endswith("/"):
            parents.append((depth, path))
        paths.add(path)
        folder = parents[-1][1] if parents and (name.endswith("/") or depth > parents[0][0] + 2) else None
        if folder:  # a folder's line, or one that goes on with it
            paths.update(folder + file for file in re.findall(r"\b\w+\.py\b", line[match.end() :]))
    return paths


def test_readme_tree_is_the_tree() -> None:
    paths = tree_paths()
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "specctl").rglob("*.py")}
    modules = {path for path in modules if not path.endswith("__init__.py")}
    assert sorted(modules - paths) == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path: Path) -> None:
    load_config(path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_resolve(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    broken = []
    for link in links:
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = path.parent / target if target else path
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_default_values_in_the_yaml_comments_are_modules_that_exist() -> None:
    for path in (ROOT / "configs").glob("*.yaml"):
        for module in re.findall(r"specctl/[\w/]+\.py", path.read_text(encoding="utf-8")):
            assert (ROOT / module).is_file(), f"{path.name} names {module}"
