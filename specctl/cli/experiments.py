"""The commands that measure: the K sweep and the break-it comparison."""

from specctl.cli.interrupts import keep
from specctl.cli.options import (
    AsJson,
    ConfigPath,
    DrafterName,
    DrafterNames,
    K,
    NoTrain,
    Overrides,
    PlotFile,
    PromptsFile,
    RuleOption,
    Seed,
    Temperature,
    TraceFile,
    artefacts_of,
    check_drafters,
    draw,
    load,
    nothing_kept,
    publish,
)
from specctl.cli.progress import show_progress


def sweep_k(
    config: ConfigPath = None,
    drafter: DrafterName = None,
    prompts: PromptsFile = None,
    temperature: Temperature = None,
    rule: RuleOption = None,
    seed: Seed = None,
    plot: PlotFile = None,
    trace: TraceFile = None,
    no_train: NoTrain = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of every K beside plain decoding and theory, and name the best."""
    from specctl.experiments.pair import Pair
    from specctl.experiments.sweep_k import sweep_k as run
    from specctl.experiments.trace import open_trace
    from specctl.experiments.workload import check_prompts
    from specctl.report.plots import check_plot, sweep_figure
    from specctl.report.tables import make_console, print_tables, sweep_categories, sweep_table

    flags = {"drafter": drafter, "prompts": prompts, "temperature": temperature, "rule": rule, "seed": seed}
    loaded = load(config, overrides, **flags)
    keep(nothing_kept(loaded, "measurement", trace))
    check_plot(plot)
    with open_trace(trace) as writer:
        artefacts = artefacts_of(loaded, no_train)
        check_prompts(artefacts)
        pair = Pair(artefacts)
        drafter_name = loaded.decoding.drafter
        if drafter_name != "none":
            pair.prepare([drafter_name], pair.ks(drafter_name)[-1])
        with show_progress("sweep-k", "run") as progress:
            result = run(pair, loaded.decoding.drafter, progress, writer)
    if not publish(pair, "sweep-k", result, as_json):
        print_tables(make_console(), sweep_table(result), sweep_categories(result))
        if result.note:
            print(result.note)
        print(f"Best K = {result.best_k}. {result.reason}")
    draw(loaded, "sweep-k", plot, lambda: sweep_figure(result))


def break_it(
    config: ConfigPath = None,
    drafters: DrafterNames = None,
    k: K = None,
    prompts: PromptsFile = None,
    temperature: Temperature = None,
    rule: RuleOption = None,
    seed: Seed = None,
    plot: PlotFile = None,
    trace: TraceFile = None,
    no_train: NoTrain = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare plain decoding with every drafter at the same K, and say why each pays or does not."""
    from specctl.experiments.break_it import break_it as run
    from specctl.experiments.break_it import explain_acceptance
    from specctl.experiments.pair import Pair
    from specctl.experiments.trace import open_trace
    from specctl.experiments.workload import check_prompts
    from specctl.report.plots import break_it_figure, check_plot
    from specctl.report.tables import break_it_categories, break_it_table, make_console, print_tables

    loaded = load(config, overrides, k=k, prompts=prompts, temperature=temperature, rule=rule, seed=seed)
    keep(nothing_kept(loaded, "measurement", trace))
    check_drafters(loaded, drafters or ())
    check_plot(plot)
    with open_trace(trace) as writer:
        artefacts = artefacts_of(loaded, no_train)
        check_prompts(artefacts)
        pair = Pair(artefacts)
        names = list(dict.fromkeys(drafters or loaded.drafters))
        pair.prepare(names, loaded.decoding.num_speculative_tokens)
        with show_progress("break-it", "run") as progress:
            result = run(pair, names, progress, writer)
    if not publish(pair, "break-it", result, as_json):
        print_tables(make_console(), break_it_table(result), break_it_categories(result))
        if result.note:
            print(result.note)
        for row in result.rows:
            if row.cause:
                print(f"{row.name}: {row.cause}")
            if explanation := explain_acceptance(row):
                print(f"  {explanation}")
    draw(loaded, "break-it", plot, lambda: break_it_figure(result))
