"""The command that looks at models without loading them: can these two speculate together?"""

from typing import Annotated

import typer

from specctl.cli.options import AsJson, ConfigPath, Overrides, Wide, load, narrate

TargetPath = Annotated[
    str | None,
    typer.Argument(metavar="[TARGET]", help="A model's folder, GGUF file or hub id; the run's if not given."),
]
DraftPath = Annotated[
    str | None,
    typer.Argument(metavar="[DRAFT]", help="A draft for it, or Medusa heads: a folder, GGUF file or hub id."),
]


def inspect(
    target: TargetPath = None,
    draft: DraftPath = None,
    config: ConfigPath = None,
    overrides: Overrides = None,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Show what models are and whether each draft can speculate with the target; exit code 3 if one cannot."""
    from dataclasses import asdict

    from specctl.errors import UsageError
    from specctl.experiments.inspect import Source, sources_of
    from specctl.experiments.inspect import inspect as run
    from specctl.models.hf_folder import find_folder
    from specctl.report.inspection import models_table, pair_line, storage_line

    if target and config:
        raise UsageError("give folders or a run file (-c), not both")
    loaded = load(config, overrides)
    if target:
        given = {"target": target, "draft": draft}
        sources = [Source(name=name, folder=find_folder(path)) for name, path in given.items() if path]
    else:
        sources, untrained = sources_of(loaded)
        for name in untrained:
            narrate(f"{name} is not trained yet and is left out")
    found = run(sources, loaded.runtime)
    if as_json:
        from specctl.report.files import SCHEMA_VERSION
        from specctl.run_folder import to_text

        print(to_text({"schema_version": SCHEMA_VERSION, **asdict(found)}))
    else:
        from specctl.report.layout import make_console, print_tables

        print_tables(make_console(), models_table(found), wide=wide)
        for line in filter(None, map(storage_line, found.models)):
            print(line)
        for pair in found.pairs:
            print(pair_line(pair))
    if not found.can_speculate:
        raise typer.Exit(3)
