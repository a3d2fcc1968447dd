"""The direction of imports: a module imports only from its own row of DESIGN.md or from rows above it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import specctl

PACKAGE = Path(specctl.__file__).parent
ROWS = (
    ("errors", "events", "theory", "hardware", "progress", "background", "locks"),
    ("config", "config_file"),
    ("run_folder", "builtin_text", "documents", "corpus", "tokenizer", "chat", "prompts", "config_starter"),
    ("models",),
    ("sampling", "acceptance", "chance", "continuation"),
    ("drafters",),
    ("stopping", "decoding", "stats"),
    ("training",),
    ("experiments",),
    ("report",),
    ("cli", "__main__"),
)
ROW_OF = {name: number for number, names in enumerate(ROWS) for name in names}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    """The module or package of specctl that a file belongs to, by its name in DESIGN.md."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute names of everything imported, `from a import b` as a.b, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def upward_imports(part: str, source: str) -> list[str]:
    """What a file of `part` imports from rows below its own."""
    found = []
    for name, line in imports(ast.parse(source)):
        pieces = name.split(".")
        if pieces[0] == "specctl" and pieces[1] in ROW_OF and ROW_OF[pieces[1]] > ROW_OF[part]:
            found.append(f"line {line}: {part} imports {name}")
    return found


def third_party(path: Path) -> set[str]:
    roots = {name.split(".")[0] for name, _ in imports(ast.parse(path.read_text()))}
    return roots - set(sys.stdlib_module_names)


def calls_print(source: str) -> bool:
    """Whether anything is printed or written to a standard stream."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            return True
        if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr"):
            return True
    return False


def test_every_file_has_a_row() -> None:
    assert len(FILES) > 20
    assert {part_of(path) for path in FILES} <= set(ROW_OF)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    assert upward_imports(part_of(path), path.read_text()) == []


def test_an_upward_import_is_seen() -> None:
    for source in (
        "from specctl.decoding import plain",
        "from specctl import decoding",
        "def f():\n    import specctl.decoding",
    ):
        assert upward_imports("sampling", source)
    assert not upward_imports("sampling", "from specctl.acceptance import residual\nimport specctl.events")


def test_the_rule_imports_torch_alone() -> None:
    assert third_party(PACKAGE / "acceptance.py") == {"torch"}


def test_only_the_face_prints() -> None:
    printing = {part_of(path) for path in FILES if calls_print(path.read_text())}
    assert printing <= {"cli", "report"}
    assert calls_print("print(1)") and calls_print("import sys\nsys.stdout.write('x')")


def test_only_report_and_cli_know_rich_and_typer() -> None:
    knowing = {part_of(path) for path in FILES if third_party(path) & {"rich", "typer", "matplotlib"}}
    assert knowing <= {"cli", "report"}


def test_only_hf_imports_transformers() -> None:
    importing = {path.relative_to(PACKAGE).as_posix() for path in FILES if "transformers" in third_party(path)}
    assert importing <= {"models/hf.py"}


def test_one_module_imports_gguf() -> None:
    importing = {path.relative_to(PACKAGE).as_posix() for path in FILES if "gguf" in third_party(path)}
    assert importing == {"models/gguf_weights.py"}


def test_the_face_is_instant() -> None:
    """`specctl --help` needs none of the heavy imports."""
    code = "import sys, specctl.cli.commands \n"
    code += "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
