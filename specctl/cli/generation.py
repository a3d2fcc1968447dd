"""The command that generates."""

from typing import Annotated

import typer

from specctl.cli.options import (
    AsJson,
    ConfigPath,
    DrafterName,
    K,
    NoTrain,
    Overrides,
    Seed,
    Temperature,
    artefacts_of,
    load,
    narrate,
    publish,
)


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

    loaded = load(config, overrides, prompt=prompt, k=k, temperature=temperature, drafter=drafter, seed=seed)
    pair = Pair(artefacts_of(loaded, no_train))
    stream = Stream(make_console(), pair.artefacts.tokenizer, loaded.decoding.prompt, show_rounds, quiet=as_json)
    result = run(pair, stream.begin, stream.show)
    stream.finish()
    narrate(summary(result))
    publish(pair, "generate", result, as_json)
