"""The commands that train: the target and its drafters."""

from typing import TYPE_CHECKING

from specctl.cli.options import AsJson, ConfigPath, DrafterName, Force, Overrides, artefacts_of, load, narrate

if TYPE_CHECKING:
    from specctl.config import RunConfig


def _train(names: list[str], config: "RunConfig", force: bool, as_json: bool) -> None:
    """Train "target" or drafters, then show their reports."""
    from specctl.report.files import result_document, save_result, to_text
    from specctl.report.tables import make_console, print_table, training_table

    artefacts = artefacts_of(config)
    for name in names:
        if force:
            artefacts.train_again(name)
        artefacts.target() if name == "target" else artefacts.draft(name)
        report = artefacts.report(name)
        if not artefacts.was_trained(name):
            narrate(f"{name} is already trained with this config ({report['path']}); --force trains it again")
        document = result_document(config, report, device="cpu", threads=report["threads"])
        save_result(config, f"train-{name}", document)
        if as_json:
            print(to_text(document))
    if not as_json:
        shown = ["target", *(name for name in config.drafters if artefacts.is_trained(name))]
        print_table(
            make_console(), training_table([artefacts.report(name) for name in shown if artefacts.is_trained(name)])
        )


def train_target(
    config: ConfigPath = None, overrides: Overrides = None, force: Force = False, as_json: AsJson = False
) -> None:
    """Train the target, the model whose output is wanted."""
    _train(["target"], load(config, overrides), force, as_json)


def train_draft(
    config: ConfigPath = None,
    drafter: DrafterName = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train a draft model, the run's default one unless another is named."""
    loaded = load(config, overrides, drafter=drafter)
    _train([loaded.decoding.drafter], loaded, force, as_json)


def train_mismatched(
    config: ConfigPath = None, overrides: Overrides = None, force: Force = False, as_json: AsJson = False
) -> None:
    """Train the drafter named mismatched: like aligned, but on other text."""
    _train(["mismatched"], load(config, overrides), force, as_json)
