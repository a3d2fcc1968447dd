"""What the commands share: their common options, and the way from a config to a result that is shown and kept."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.completion import drafter_names
from specctl.cli.interrupts import keep
from specctl.cli.progress import show_progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from specctl.config import RunConfig
    from specctl.experiments.pair import Pair
    from specctl.training.ensure import Artefacts

ConfigPath = Annotated[
    Path | None, typer.Option("--config", "-c", help="Run file; if not given, the built-in tiny run.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Wide = Annotated[bool, typer.Option("--wide", help="Show every column of tables, however wide they get.")]
NoTrain = Annotated[bool, typer.Option("--no-train", help="Refuse, rather than train, what the run lacks.")]
Force = Annotated[bool, typer.Option("--force", help="Train again even where the stored model is current.")]
DrafterName = Annotated[
    str | None,
    typer.Option("--drafter", help="A name under drafters in the config, or none.", autocompletion=drafter_names),
]
DrafterNames = Annotated[
    list[str] | None,
    typer.Option("--drafter", help="Only this drafter of the config; may be repeated.", autocompletion=drafter_names),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png|svg", help="Draw the result here (needs the plots extra, matplotlib)."),
]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE.jsonl", help="Write each round here as a line of JSON.")
]
PromptsFile = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="Prompts: text lines, JSONL or Spec-Bench questions (prompts)."),
]
K = Annotated[int | None, typer.Option("--k", help="Tokens drafted a round (decoding.num_speculative_tokens).")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy (decoding.temperature).")]
RuleOption = Annotated[
    str | None, typer.Option("--rule", help="token or block, both exact, or typical, which is LOSSY (decoding.rule).")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Of the draws and the choice of prompts (seed).")]

_FIELDS = {
    "prompt": "decoding.prompt",
    "prompts": "prompts",
    "k": "decoding.num_speculative_tokens",
    "temperature": "decoding.temperature",
    "drafter": "decoding.drafter",
    "rule": "decoding.rule",
    "seed": "seed",
}


def load(config: Path | None, overrides: list[str] | None, **flags: Any) -> "RunConfig":
    """The run's config, with the natural flags as overrides of their fields."""
    from specctl.config_file import default_config_path, load_config

    flags = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    values = {_FIELDS[name]: value for name, value in flags.items() if value is not None}
    typed = {field: f"--{name}" for name, field in _FIELDS.items()}
    return load_config(config or default_config_path(), overrides or (), values, typed)


def check_drafters(config: "RunConfig", names: Sequence[str]) -> None:
    """Refuse what --drafter names and the config does not have, before any work."""
    from specctl.config import nearest
    from specctl.errors import UsageError

    wrong = [name for name in names if name not in config.drafters]
    if wrong:
        known = list(config.drafters)
        raise UsageError("\n".join(f"--drafter: no drafter is named {name!r}{nearest(name, known)}" for name in wrong))


def narrate(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def artefacts_of(config: "RunConfig", no_train: bool = False) -> "Artefacts":
    from specctl.training.ensure import Artefacts

    return Artefacts(config, narrate=narrate, may_train=not no_train, progress=show_progress)


def nothing_kept(config: "RunConfig", what: str, trace: Path | None = None) -> str:
    """What stays if a command is interrupted whose result is written at its end."""
    rounds = f"; the rounds so far are in {trace}" if trace else ""
    return f"nothing of this {what} is kept, the models in {config.run_dir} are{rounds}"


def publish(pair: "Pair", name: str, result: Any, as_json: bool, conclusions: Sequence[str] | None = None) -> bool:
    """Store a result in the run folder; print it where JSON was asked for, and say whether it was.

    conclusions: what a person is told of it, in sentences.
    """
    from specctl.report.files import result_document, save_result
    from specctl.run_folder import to_text

    document = result_document(
        pair.config, result, device=str(pair.device), threads=pair.threads, tuning=pair.tuning, paths=pair.paths
    )
    if conclusions is not None:
        document["conclusions"] = list(conclusions)
    path = save_result(pair.config, name, document)
    keep(f"the result is in {path}")
    narrate(f"saved {path}")
    if as_json:
        print(to_text(document))
    return as_json


def draw(config: "RunConfig", name: str, plot: Path | None, figure: Callable[[], "Figure"]) -> None:
    """Draw a result where --plot says, else beside its JSON in the run folder if matplotlib is installed."""
    from specctl.report.plots import can_draw, save_figure

    if plot or can_draw():
        path = plot or Path(config.run_dir) / "results" / f"{name}.png"
        save_figure(figure(), path)
        narrate(f"saved {path}")
