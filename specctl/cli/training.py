"""The commands that train: the target and its drafters."""

from typing import TYPE_CHECKING, Annotated

import typer

from specctl.cli.interrupts import keep
from specctl.cli.options import (
    AsJson,
    ConfigPath,
    DrafterName,
    Force,
    Overrides,
    PlotFile,
    Wide,
    artefacts_of,
    draw,
    load,
    narrate,
)

if TYPE_CHECKING:
    from pathlib import Path

    from specctl.config import RunConfig

Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted training where it stopped.")]


def _train(
    names: list[str],
    config: "RunConfig",
    *,
    force: bool,
    resume: bool,
    plot: "Path | None",
    wide: bool,
    as_json: bool,
) -> None:
    """Train "target" or drafters, then show their reports."""
    from specctl.errors import UsageError
    from specctl.report.files import result_document, save_result
    from specctl.report.layout import make_console, print_tables
    from specctl.report.plots import check_plot, heads_figure, training_figure
    from specctl.report.tables import heads_table, training_table
    from specctl.run_folder import to_text

    if force and resume:
        raise UsageError("--force trains anew and --resume goes on with what there is; give one of them")
    keep(f"what was finished is kept in {config.run_dir}, and the same command goes on")
    check_plot(plot)
    artefacts = artefacts_of(config)
    for name in names:
        if force:
            artefacts.train_again(name)
        if resume:
            artefacts.resume(name)
        artefacts.ensure(name)
        report = artefacts.report(name)
        if not artefacts.was_trained(name) and not report["interrupted"]:
            done = f"complete, {report['steps']:,} steps: nothing to resume" if resume else "trained with this config"
            narrate(f"{name} is already {done} ({report['path']}); --force trains it again")
        document = result_document(config, report, device="cpu", threads=report["threads"])
        save_result(config, f"train-{name}", document)
        if as_json:
            print(to_text(document))
    reports = [artefacts.report(name) for name in ("target", *config.drafters) if artefacts.is_trained(name)]
    models = [report for report in reports if "validation_loss" in report]
    heads = [report for report in reports if "validation_loss" not in report]
    if not as_json:
        tables = [table(of) for table, of in ((training_table, models), (heads_table, heads)) if of]
        print_tables(make_console(), *tables, wide=wide)
    if set(names) <= {report["name"] for report in heads}:
        draw(config, "train-medusa", plot, lambda: heads_figure(heads))
    else:
        draw(config, "training", plot, lambda: training_figure(models))


def train_target(
    config: ConfigPath = None,
    overrides: Overrides = None,
    force: Force = False,
    resume: Resume = False,
    plot: PlotFile = None,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Train the target, the model whose output is wanted."""
    _train(["target"], load(config, overrides), force=force, resume=resume, plot=plot, wide=wide, as_json=as_json)


def train_draft(
    config: ConfigPath = None,
    drafter: DrafterName = None,
    overrides: Overrides = None,
    force: Force = False,
    resume: Resume = False,
    plot: PlotFile = None,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Train a draft model, the run's default one unless another is named."""
    loaded = load(config, overrides, drafter=drafter)
    _train([loaded.decoding.drafter], loaded, force=force, resume=resume, plot=plot, wide=wide, as_json=as_json)


def train_mismatched(
    config: ConfigPath = None,
    overrides: Overrides = None,
    force: Force = False,
    resume: Resume = False,
    plot: PlotFile = None,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Train the drafter named mismatched: like aligned, but on other text."""
    _train(["mismatched"], load(config, overrides), force=force, resume=resume, plot=plot, wide=wide, as_json=as_json)


def train_medusa(
    config: ConfigPath = None,
    drafter: DrafterName = None,
    overrides: Overrides = None,
    force: Force = False,
    resume: Resume = False,
    plot: PlotFile = None,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Train Medusa heads on the target, those of the config's first medusa drafter unless another is named."""
    from specctl.config import MedusaConfig
    from specctl.errors import UsageError

    loaded = load(config, overrides, drafter=drafter)
    having_heads = [name for name, source in loaded.drafters.items() if isinstance(source, MedusaConfig)]
    name = drafter or next(iter(having_heads), None)
    if name not in having_heads:
        wanted = f"drafter {name} has no heads" if name else "no drafter has heads"
        raise UsageError(f"{wanted}; give it kind: medusa under drafters in the config")
    _train([name], loaded, force=force, resume=resume, plot=plot, wide=wide, as_json=as_json)
