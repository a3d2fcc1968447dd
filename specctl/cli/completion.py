"""What a shell is offered on TAB beyond the commands and options that typer completes by itself.

Reads the run file as plain YAML: checking it would take longer than a person waits for a TAB.
"""

from pathlib import Path

import typer


def drafter_names(context: typer.Context, incomplete: str) -> list[str]:
    """The drafters of the config that -c names, or of the default one, and none."""
    try:
        names = _names_in(context.params.get("config"))
    except Exception:  # whatever is wrong with the file is for the command to say, not for a TAB
        names = []
    return [name for name in [*names, "none"] if name.startswith(incomplete)]


def _names_in(config: Path | None) -> list[str]:
    import yaml

    if config is None:
        from specctl.config_file import default_config_path

        config = default_config_path()
    tree = yaml.safe_load(config.expanduser().read_text(encoding="utf-8"))  # a shell passes on ~ as it stands
    return [str(name) for name in tree["drafters"]]
