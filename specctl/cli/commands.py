"""The commands, by their names: each loads a config, calls one function and renders what comes back.

Results go to stdout, narration and progress to stderr. Heavy imports happen inside commands, so
that `specctl --help` is instant.
"""

from typing import Annotated

import typer

from specctl import __version__
from specctl.cli.configs import configs
from specctl.cli.experiments import break_it, sweep_k
from specctl.cli.generation import generate
from specctl.cli.inspection import inspect
from specctl.cli.training import train_draft, train_medusa, train_mismatched, train_target
from specctl.cli.verification import verify

app = typer.Typer(
    name="specctl",
    help="Speculative decoding: train drafts, generate exactly, find the best K, see what breaks it.",
    epilog="Start with: specctl sweep-k",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train-target", epilog="Example: specctl train-target -c configs/tiny.yaml")(train_target)
app.command("train-draft", epilog="Example: specctl train-draft --drafter aligned")(train_draft)
app.command("train-mismatched", epilog="Example: specctl train-mismatched -c configs/tiny.yaml")(train_mismatched)
app.command("train-medusa", epilog="Example: specctl train-medusa -c configs/tiny.yaml")(train_medusa)
app.command("generate", epilog="Example: specctl generate --prompt 'def read_' --k 4 --show-rounds")(generate)
app.command("sweep-k", epilog="Example: specctl sweep-k --drafter distilled --set sweep.repeats=5")(sweep_k)
app.command("break-it", epilog="Example: specctl break-it --k 4 --temperature 1")(break_it)
app.command("verify", epilog="Example: specctl verify --drafter distilled --tokens 500")(verify)
app.command("inspect", epilog="Example: specctl inspect -c configs/tiny.yaml")(inspect)
app.add_typer(configs)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"specctl {__version__}")
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Common to all commands."""
