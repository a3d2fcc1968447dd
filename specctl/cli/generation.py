"""The command that generates: from one prompt, or from a file of them."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.cli.interrupts import keep
from specctl.cli.options import (
    AsJson,
    ConfigPath,
    DrafterName,
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
    draw,
    load,
    narrate,
    nothing_kept,
    publish,
)
from specctl.cli.progress import show_progress
from specctl.progress import silent

if TYPE_CHECKING:
    from specctl.config import RunConfig
    from specctl.events import Round
    from specctl.experiments.generate import Generation
    from specctl.experiments.generate_file import Generations
    from specctl.experiments.pair import Pair
    from specctl.experiments.trace import Trace
    from specctl.prompts import Prompt

_BREAK = "\n\n"  # between a user's message and its answer

OutputFile = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE.jsonl", help="Write a line a prompt here; run again, it goes on."),
]


def generate(
    config: ConfigPath = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue (decoding.prompt).")] = None,
    prompts: PromptsFile = None,
    output: OutputFile = None,
    k: K = None,
    temperature: Temperature = None,
    drafter: DrafterName = None,
    rule: RuleOption = None,
    seed: Seed = None,
    show_rounds: Annotated[bool, typer.Option("--show-rounds", help="Colour accepted, recovered, bonus.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time of a round goes.")] = False,
    plot: PlotFile = None,
    trace: TraceFile = None,
    no_train: NoTrain = False,
    overrides: Overrides = None,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, or every prompt of a file; the text has exactly the target's distribution."""
    from specctl.errors import UsageError

    if prompt is not None and prompts is not None:
        raise UsageError("--prompt is one prompt and --prompts a file of them; give one of the two")
    flags = {"k": k, "temperature": temperature, "drafter": drafter, "rule": rule, "seed": seed}
    loaded = load(config, overrides, prompt=prompt, prompts=prompts, **flags)
    keep(nothing_kept(loaded, "text", trace))
    if prompt is None and loaded.prompts is not None:
        for flag, given in (("--plot", plot), ("--profile", profile)):
            if given:
                raise UsageError(f"{flag} shows the rounds of one prompt; give --prompt rather than a file of prompts")
        if output and show_rounds:
            raise UsageError(
                "--show-rounds shows text as it comes and --output writes it to a file; give one of the two"
            )
        _generate_all(loaded, output, show_rounds, trace, no_train, wide, as_json)
    elif output:
        raise UsageError("--output takes a line a prompt and needs a file of them; give --prompts FILE")
    else:
        _generate_one(loaded, show_rounds, profile, plot, trace, no_train, wide, as_json)


def _generate_one(
    loaded: "RunConfig",
    show_rounds: bool,
    profile: bool,
    plot: Path | None,
    trace: Path | None,
    no_train: bool,
    wide: bool,
    as_json: bool,
) -> None:
    from specctl.errors import UsageError
    from specctl.events import Round
    from specctl.experiments.generate import check_prompt, plain_step_seconds
    from specctl.experiments.generate import generate as run
    from specctl.experiments.pair import Pair
    from specctl.experiments.trace import open_trace
    from specctl.report.layout import make_console
    from specctl.report.plots import check_plot
    from specctl.report.rounds import Stream, summary
    from specctl.report.timeline import timeline_figure

    if plot and (loaded.decoding.drafter == "none" or loaded.decoding.num_speculative_tokens == 0):
        raise UsageError("--plot shows rounds of speculation, and plain decoding has none; choose a drafter and --k")
    check_plot(plot)
    rounds: list[Round] = []
    with open_trace(trace) as writer:
        artefacts = artefacts_of(loaded, no_train)
        check_prompt(artefacts)
        pair = Pair(artefacts)
        tokenizer, text = pair.artefacts.tokenizer, pair.visible_text
        shown = loaded.decoding.prompt + _BREAK * loaded.chat
        stream = Stream(make_console(), tokenizer, text, shown, show_rounds, quiet=as_json)

        def show(round_: Round) -> None:
            rounds.append(round_)
            stream.show(round_)

        try:
            result = run(pair, stream.begin, show, writer)
        finally:
            stream.finish()
    narrate(summary(result))
    publish(pair, "generate", result, as_json)
    if profile:
        _show_profile(pair, result, rounds, wide)
    if plot:  # never unasked: it takes plain steps of the target
        draw(loaded, "generate", plot, lambda: timeline_figure(result, rounds, plain_step_seconds(pair)))


def _show_profile(pair: "Pair", result: "Generation", rounds: "list[Round]", wide: bool) -> None:
    """Beside the text, on stderr."""
    from specctl.experiments.profile import profile
    from specctl.report.layout import make_console, print_tables
    from specctl.report.tables import profile_table

    found = profile(pair, result.drafter, result.k, rounds)
    if found is None:
        narrate(f"no profile: no round but the first drafted {result.k} tokens; generate more")
    else:
        print_tables(make_console(stderr=True), profile_table(found), wide=wide)


def _generate_all(
    loaded: "RunConfig",
    output: Path | None,
    show_rounds: bool,
    trace: Path | None,
    no_train: bool,
    wide: bool,
    as_json: bool,
) -> None:
    """All prompts of a file, into another file or to stdout."""
    from specctl.experiments.generate_file import generate_file
    from specctl.experiments.output_file import open_output
    from specctl.experiments.pair import Pair
    from specctl.experiments.trace import open_trace
    from specctl.experiments.workload import check_prompts, prompts_of
    from specctl.report.layout import make_console, print_tables
    from specctl.report.tables import generations_table

    prompts = prompts_of(loaded)
    with open_output(output) if output else nullcontext() as opened, open_trace(trace) as writer:
        if opened and not opened.is_stream:
            keep(f"the finished lines in {output} are kept, and the same command goes on")
        artefacts = artefacts_of(loaded, no_train)
        check_prompts(artefacts)
        pair = Pair(artefacts)
        pair.prepare([loaded.decoding.drafter], loaded.decoding.num_speculative_tokens)
        if opened:
            with show_progress("generate", "prompt") as progress:
                result = generate_file(pair, prompts, opened, progress, writer)
            if not opened.is_stream:
                narrate(f"{result.num_found} of {len(prompts)} prompts were done before; the lines are in {output}")
        else:
            result = _stream(pair, prompts, show_rounds, writer, quiet=as_json)
    if not publish(pair, "generate", result, as_json):
        beside_text = opened is None or opened.is_stream
        print_tables(make_console(stderr=beside_text), generations_table(result), wide=wide)


def _stream(
    pair: "Pair", prompts: "list[Prompt]", show_rounds: bool, trace: "Trace | None", *, quiet: bool
) -> "Generations":
    """Print each prompt and its text as it comes, below a line that names the prompt."""
    from specctl.experiments.generate import generate as run
    from specctl.experiments.generate_file import line_of, summarise
    from specctl.experiments.workload import encode
    from specctl.report.layout import make_console
    from specctl.report.rounds import Stream

    encode(prompts, pair.artefacts, pair.target.context_length)  # refuses what does not fit
    lines = []
    with (show_progress if quiet else silent)("generate", "prompt") as update:
        for index, prompt in enumerate(prompts):
            if not quiet:
                print(f"== {prompt.id}" + (f" ({prompt.category})" if prompt.category else ""), flush=True)
            tokenizer, text = pair.artefacts.tokenizer, pair.visible_text
            shown = prompt.text + _BREAK * pair.config.chat
            stream = Stream(make_console(), tokenizer, text, shown, show_rounds, quiet=quiet)
            try:
                result = run(pair, stream.begin, stream.show, trace, text=prompt.text, request=index)
            finally:
                stream.finish()
            lines.append(line_of(prompt, result, pair.config.seed))
            update(len(lines), len(prompts))
    return summarise(pair, lines)
