"""The commands that measure: the K sweep and the break-it comparison."""

from typing import TYPE_CHECKING

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
    Wide,
    artefacts_of,
    check_drafters,
    draw,
    load,
    narrate,
    nothing_kept,
    publish,
)
from specctl.cli.progress import show_progress

if TYPE_CHECKING:
    from specctl.training.ensure import Artefacts


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
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of every K beside plain decoding and theory, and name the best."""
    from specctl.experiments.pair import Pair
    from specctl.experiments.sweep_k import sweep_k as run
    from specctl.experiments.trace import open_trace
    from specctl.experiments.workload import check_prompts
    from specctl.report.conclusions import sweep_conclusions
    from specctl.report.layout import make_console, print_lines, print_tables
    from specctl.report.plots import check_plot, sweep_figure
    from specctl.report.tables import sweep_categories, sweep_table

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
    conclusions = sweep_conclusions(result)
    if not publish(pair, "sweep-k", result, as_json, conclusions):
        print_tables(make_console(), sweep_table(result), sweep_categories(result), wide=wide)
        print_lines(make_console(), conclusions)
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
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Compare plain decoding with the run's drafters at the same K, and say why each pays or does not.

    Draft models are trained where the run lacks them; Medusa heads only if they are named.
    """
    from specctl.experiments.break_it import break_it as run
    from specctl.experiments.pair import Pair
    from specctl.experiments.trace import open_trace
    from specctl.experiments.workload import check_prompts
    from specctl.report.conclusions import break_it_conclusions
    from specctl.report.layout import make_console, print_lines, print_tables
    from specctl.report.plots import break_it_figure, check_plot
    from specctl.report.tables import break_it_categories, break_it_table

    loaded = load(config, overrides, k=k, prompts=prompts, temperature=temperature, rule=rule, seed=seed)
    keep(nothing_kept(loaded, "measurement", trace))
    check_drafters(loaded, drafters or ())
    check_plot(plot)
    with open_trace(trace) as writer:
        artefacts = artefacts_of(loaded, no_train)
        check_prompts(artefacts)
        pair = Pair(artefacts)
        names = list(dict.fromkeys(drafters)) if drafters else _at_hand(artefacts)
        pair.prepare(names, loaded.decoding.num_speculative_tokens)
        with show_progress("break-it", "run") as progress:
            result = run(pair, names, progress, writer)
    conclusions = break_it_conclusions(result)
    if not publish(pair, "break-it", result, as_json, conclusions):
        print_tables(make_console(), break_it_table(result), break_it_categories(result), wide=wide)
        print_lines(make_console(), conclusions)
    draw(loaded, "break-it", plot, lambda: break_it_figure(result))


def _at_hand(artefacts: "Artefacts") -> list[str]:
    """The run's drafters but for heads that are not trained, which are named; all where there are no others."""
    names = list(artefacts.config.drafters)
    left_out = [name for name in names if artefacts.lacks_heads(name)]
    if not left_out or left_out == names:
        return names
    flags = " ".join(f"--drafter {name}" for name in left_out)
    narrate(
        f"{', '.join(left_out)}: left out, since training heads takes minutes; {flags} compares with them, and so does "
        "every break-it after specctl train-medusa"
    )
    return [name for name in names if name not in left_out]
