"""The `specctl config` group: write a run file to start from, show one resolved, print the schema."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.interrupts import keep
from specctl.cli.options import ConfigPath, Overrides, load, narrate
from specctl.errors import UsageError

configs = typer.Typer(
    name="config",
    help="Write a run file to start from, show what one resolves to, print the schema.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@configs.command("init", epilog="Example: specctl config init mine.yaml --text notes --text 'more/*.txt'")
def init(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The YAML file to write.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FOLDER|FILE|PATTERN",
            help="Your own text; may be repeated.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
) -> None:
    """Write a commented run file, its sizes chosen to fit your text and a laptop."""
    from specctl.config_starter import measure_text, starter
    from specctl.run_folder import write_atomic

    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the name of the file to write, such as {path / 'mine.yaml'}")
    if path.exists() and not force:
        raise UsageError(f"{path} exists; --force overwrites it, or choose another name")
    found = measure_text(text) if text else None
    write_atomic(path, starter(path.stem, found).encode("utf-8"))
    keep(f"{path} is written")
    if found:
        narrate(f"wrote {path}: {found.num_documents:,} documents, {found.num_characters:,} characters of text")
    else:
        narrate(f"wrote {path} on built-in text; --text FOLDER takes your own")
    name = shlex.quote(str(path))
    narrate(f"next:\n  specctl sweep-k -c {name} --plot sweep.png\n  specctl break-it -c {name}")


@configs.command("show", epilog="Example: specctl config show -c configs/tiny.yaml --set seed=1")
def show(
    config: ConfigPath = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Print every field as a run would see it, defaults and --set included; the output is a run file itself."""
    from specctl.config_file import to_yaml
    from specctl.run_folder import to_text

    resolved = load(config, overrides).model_dump(mode="json")
    print(to_text(resolved) if as_json else to_yaml(resolved).rstrip("\n"))


@configs.command("schema", epilog="Example: specctl config schema")
def schema() -> None:
    """Print the JSON schema of run files, with which an editor completes and checks them."""
    from specctl.config_file import json_schema
    from specctl.run_folder import to_text

    print(to_text(json_schema()))
