"""The command that verifies: does anything in this pair depart from the target's distribution?"""

from typing import Annotated

import typer

from specctl.cli.interrupts import keep
from specctl.cli.options import (
    AsJson,
    ConfigPath,
    DrafterName,
    K,
    NoTrain,
    Overrides,
    PromptsFile,
    RuleOption,
    Seed,
    Temperature,
    Wide,
    artefacts_of,
    load,
    narrate,
    nothing_kept,
    publish,
)
from specctl.cli.progress import show_progress

NumTokens = Annotated[
    int | None, typer.Option("--tokens", min=1, help="Tokens sampled: more see a smaller leak; 20,000 if not given.")
]
Planted = Annotated[bool, typer.Option("--planted", help="Also plant known bugs, and show what sees each.")]


def verify(
    config: ConfigPath = None,
    drafter: DrafterName = None,
    rule: RuleOption = None,
    k: K = None,
    tokens: NumTokens = None,
    planted: Planted = False,
    prompts: PromptsFile = None,
    temperature: Temperature = None,
    seed: Seed = None,
    no_train: NoTrain = False,
    overrides: Overrides = None,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Test on your own pair that the output keeps the target's distribution; exit code 3 if it does not."""
    from specctl.experiments.pair import Pair
    from specctl.experiments.verify.verdict import NUM_TOKENS, check_wanted
    from specctl.experiments.verify.verdict import verify as run
    from specctl.experiments.workload import check_prompts
    from specctl.report.layout import make_console, print_tables
    from specctl.report.verdicts import planted_table, verdict_table

    loaded = load(
        config, overrides, drafter=drafter, rule=rule, k=k, prompts=prompts, temperature=temperature, seed=seed
    )
    keep(nothing_kept(loaded, "verification"))
    check_wanted(loaded)
    artefacts = artefacts_of(loaded, no_train)
    check_prompts(artefacts)
    pair = Pair(artefacts)
    names = [loaded.decoding.drafter] if drafter else list(loaded.drafters)
    pair.prepare([loaded.decoding.drafter], loaded.decoding.num_speculative_tokens)
    pair.prepare(names, 1)
    with show_progress("verify", "token") as progress:
        verdict = run(
            pair,
            greedy_drafters=names,
            num_tokens=tokens or NUM_TOKENS,
            planted=planted,
            narrate=narrate,
            progress=progress,
        )
    if not publish(pair, "verify", verdict, as_json):
        print_tables(make_console(), verdict_table(verdict), planted_table(verdict), wide=wide)
        if verdict.note:
            print(verdict.note)
        keeps = (
            "keeps the target's law, as far as this run can tell" if verdict.holds else "does NOT keep the target's law"
        )
        print(f"The output {keeps}.")
        if verdict.planted is not None:
            print(f"{'Every' if verdict.all_caught else 'NOT every'} planted bug was caught as its row says.")
    if not (verdict.holds and verdict.all_caught):
        raise typer.Exit(3)
