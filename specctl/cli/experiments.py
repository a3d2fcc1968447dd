"""The commands that measure: the K sweep and the break-it comparison."""

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
    progress_bar,
    publish,
)


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

    loaded = load(config, overrides, drafter=drafter, temperature=temperature, seed=seed)
    pair = Pair(artefacts_of(loaded, no_train))
    pair.prepare([loaded.decoding.drafter])
    with progress_bar("sweep-k") as progress:
        result = run(pair, loaded.decoding.drafter, progress)
    if not publish(pair, "sweep-k", result, as_json):
        print_table(make_console(), sweep_table(result))
        print(f"Best K = {result.best_k}. {result.reason}")


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

    loaded = load(config, overrides, k=k, temperature=temperature, seed=seed)
    pair = Pair(artefacts_of(loaded, no_train))
    pair.prepare(list(loaded.drafters))
    with progress_bar("break-it") as progress:
        result = run(pair, progress)
    if not publish(pair, "break-it", result, as_json):
        print_table(make_console(), break_it_table(result))
        for row in result.rows:
            if row.cause:
                print(f"{row.name}: {row.cause}")
