"""The command line: each command loads a config, calls one function and renders what comes back.

Results go to stdout, narration and progress to stderr. Heavy imports happen inside commands, so
that `specctl --help` is instant.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl import __version__
from specctl.errors import SpecctlError

if TYPE_CHECKING:
    from specctl.config import RunConfig
    from specctl.experiments.pair import Pair
    from specctl.training.ensure import Artefacts

app = typer.Typer(
    name="specctl",
    help="Speculative decoding: train drafts, generate exactly, find the best K, see what breaks it.",
    epilog="Start with: specctl sweep-k",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigPath = Annotated[
    Path | None, typer.Option("--config", "-c", help="Run file; if not given, the built-in tiny run.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
NoTrain = Annotated[bool, typer.Option("--no-train", help="Refuse, rather than train, what the run lacks.")]
Force = Annotated[bool, typer.Option("--force", help="Train again even where the stored model is current.")]
DrafterName = Annotated[str | None, typer.Option("--drafter", help="A name under drafters in the config, or none.")]
K = Annotated[int | None, typer.Option("--k", help="Tokens drafted a round (decoding.num_speculative_tokens).")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy (decoding.temperature).")]
Seed = Annotated[int | None, typer.Option("--seed", help="Of the draws and the choice of prompts (seed).")]


def _load(config: Path | None, overrides: list[str] | None, **flags: Any) -> "RunConfig":
    """The run's config, with the natural flags as overrides of their fields."""
    from specctl.config_file import default_config_path, load_config

    fields = {
        "prompt": "decoding.prompt",
        "k": "decoding.num_speculative_tokens",
        "temperature": "decoding.temperature",
        "drafter": "decoding.drafter",
        "seed": "seed",
    }
    values = {fields[name]: value for name, value in flags.items() if value is not None}
    return load_config(config or default_config_path(), overrides or (), values)


def _narrate(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _artefacts(config: "RunConfig", no_train: bool = False) -> "Artefacts":
    from specctl.training.ensure import Artefacts

    return Artefacts(config, narrate=_narrate, may_train=not no_train, progress=sys.stderr.isatty())


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A tqdm bar on stderr, driven by (done, total)."""
    from tqdm import tqdm

    with tqdm(desc=what, unit="run", file=sys.stderr, disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update


def _publish(pair: "Pair", name: str, result: Any, as_json: bool) -> bool:
    """Store a result in the run folder; print it where JSON was asked for, and say whether it was."""
    from specctl.report.files import result_document, save_result, to_text

    document = result_document(pair.config, result, device=str(pair.device), threads=pair.threads)
    path = save_result(pair.config, name, document)
    _narrate(f"saved {path}")
    if as_json:
        print(to_text(document))
    return as_json


def _train(names: list[str], config: "RunConfig", force: bool, as_json: bool) -> None:
    """Train "target" or drafters, then show their reports."""
    from specctl.report.files import result_document, save_result, to_text
    from specctl.report.tables import make_console, print_table, training_table

    artefacts = _artefacts(config)
    for name in names:
        if force:
            artefacts.train_again(name)
        artefacts.target() if name == "target" else artefacts.draft(name)
        report = artefacts.report(name)
        if not artefacts.was_trained(name):
            _narrate(f"{name} is already trained with this config ({report['path']}); --force trains it again")
        document = result_document(config, report, device="cpu", threads=report["threads"])
        save_result(config, f"train-{name}", document)
        if as_json:
            print(to_text(document))
    if not as_json:
        shown = ["target", *(name for name in config.drafters if artefacts.is_trained(name))]
        print_table(
            make_console(), training_table([artefacts.report(name) for name in shown if artefacts.is_trained(name)])
        )


@app.command("train-target", epilog="Example: specctl train-target -c configs/tiny.yaml")
def train_target(
    config: ConfigPath = None, overrides: Overrides = None, force: Force = False, as_json: AsJson = False
) -> None:
    """Train the target, the model whose output is wanted."""
    _train(["target"], _load(config, overrides), force, as_json)


@app.command("train-draft", epilog="Example: specctl train-draft --drafter aligned")
def train_draft(
    config: ConfigPath = None,
    drafter: DrafterName = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train a draft model, the run's default one unless another is named."""
    loaded = _load(config, overrides, drafter=drafter)
    _train([loaded.decoding.drafter], loaded, force, as_json)


@app.command("train-mismatched", epilog="Example: specctl train-mismatched -c configs/tiny.yaml")
def train_mismatched(
    config: ConfigPath = None, overrides: Overrides = None, force: Force = False, as_json: AsJson = False
) -> None:
    """Train the drafter named mismatched: like aligned, but on other text."""
    _train(["mismatched"], _load(config, overrides), force, as_json)


@app.command("generate", epilog="Example: specctl generate --prompt 'def read_' --k 4 --show-rounds")
def generate(
    config: ConfigPath = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue (decoding.prompt).")] = None,
    k: K = None,
    temperature: Temperature = None,
    drafter: DrafterName = None,
    seed: Seed = None,
    show_rounds: Annotated[bool, typer.Option("--show-rounds", help="Colour accepted, recovered, bonus.")] = False,
    no_train: NoTrain = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with speculative decoding; the text has exactly the target's distribution."""
    from specctl.experiments.generate import generate as run
    from specctl.experiments.pair import Pair
    from specctl.report.rounds import Stream, summary
    from specctl.report.tables import make_console

    loaded = _load(config, overrides, prompt=prompt, k=k, temperature=temperature, drafter=drafter, seed=seed)
    pair = Pair(_artefacts(loaded, no_train))
    stream = Stream(make_console(), pair.artefacts.tokenizer, loaded.decoding.prompt, show_rounds, quiet=as_json)
    result = run(pair, stream.begin, stream.show)
    stream.finish()
    _narrate(summary(result))
    _publish(pair, "generate", result, as_json)


@app.command("sweep-k", epilog="Example: specctl sweep-k --drafter distilled --set sweep.repeats=5")
def sweep_k(
    config: ConfigPath = None,
    drafter: DrafterName = None,
    temperature: Temperature = None,
    seed: Seed = None,
    no_train: NoTrain = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of every K beside plain decoding and theory, and name the best."""
    from specctl.experiments.pair import Pair
    from specctl.experiments.sweep_k import sweep_k as run
    from specctl.report.tables import make_console, print_table, sweep_table

    loaded = _load(config, overrides, drafter=drafter, temperature=temperature, seed=seed)
    pair = Pair(_artefacts(loaded, no_train))
    pair.prepare([loaded.decoding.drafter])
    with _progress("sweep-k") as progress:
        result = run(pair, loaded.decoding.drafter, progress)
    if not _publish(pair, "sweep-k", result, as_json):
        print_table(make_console(), sweep_table(result))
        print(f"Best K = {result.best_k}. {result.reason}")


@app.command("break-it", epilog="Example: specctl break-it --k 4 --temperature 1")
def break_it(
    config: ConfigPath = None,
    k: K = None,
    temperature: Temperature = None,
    seed: Seed = None,
    no_train: NoTrain = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare plain decoding with every drafter at the same K, and say why each pays or does not."""
    from specctl.experiments.break_it import break_it as run
    from specctl.experiments.pair import Pair
    from specctl.report.tables import break_it_table, make_console, print_table

    loaded = _load(config, overrides, k=k, temperature=temperature, seed=seed)
    pair = Pair(_artefacts(loaded, no_train))
    pair.prepare(list(loaded.drafters))
    with _progress("break-it") as progress:
        result = run(pair, progress)
    if not _publish(pair, "break-it", result, as_json):
        print_table(make_console(), break_it_table(result))
        for row in result.rows:
            if row.cause:
                print(f"{row.name}: {row.cause}")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"specctl {__version__}")
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Common to all commands."""


def main() -> None:
    """Run the command line; a person's mistake is one message on stderr and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character shows its code
    try:
        app()
    except SpecctlError as error:
        red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        print(f"{red}specctl: {error}{plain}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("specctl: interrupted; nothing was saved", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        print(f"specctl: {error}", file=sys.stderr)
        sys.exit(1)
