"""Results as rich tables: numbers never cut, plain text in a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from specctl.report.lossy import labelled

if TYPE_CHECKING:  # they import torch, which `inspect` does without
    from specctl.experiments.break_it import BreakIt
    from specctl.experiments.generate_file import Generations, Totals
    from specctl.experiments.intervals import CategoryFigures, Interval
    from specctl.experiments.profile import Profile
    from specctl.experiments.sweep_k import Sweep

_UNLIMITED = 10_000  # columns; measured against less, a table claims to fit


def make_console(stderr: bool = False) -> Console:
    """A console for results (stdout) or narration (stderr); in a pipe lines are as wide as they need."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200
    return console


def training_table(reports: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Training", title_justify="left")
    table.add_column("model", no_wrap=True)
    for heading in ("parameters", "loss", "tokens", "seconds", "train", "validation", "own text"):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        table.add_row(
            report["name"],
            f"{report['num_parameters']:,}",
            report["loss"],
            f"{report['tokens']:,}",
            f"{report['seconds']:.0f}",
            *(_loss(report[name]) for name in ("train_loss", "validation_loss", "own_validation_loss")),
        )
    table.caption = (
        "Losses in nats a token: train in the loss trained with, validation cross-entropy on the target's text."
    )
    table.caption_justify = "left"
    return table


def heads_table(reports: Sequence[Mapping[str, Any]]) -> Table:
    """Medusa heads: how long their chains would be, and how often each is right."""
    table = Table(title="Medusa heads", title_justify="left")
    table.add_column("model", no_wrap=True)
    for heading in ("parameters", "loss", "tokens", "seconds", "train", "tokens/pass", "head", "top-1", "top-5"):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        figures = report["figures"]
        facts = [
            report["name"],
            f"{report['num_parameters']:,}",
            report["loss"],
            f"{report['tokens']:,}",
            f"{report['seconds']:.0f}",
            _loss(report["train_loss"]),
            _plain(figures["expected_acceptance_length"]),
        ]
        for head in range(sum(name.endswith("_top_1") for name in figures)):
            row = facts if head == 0 else [""] * len(facts)
            accuracies = (figures[f"head_{head}_top_{n}"] for n in (1, 5))
            table.add_row(*row, str(head), *map(_share, accuracies))
    table.caption = (
        "On validation text: tokens a pass expected at temperature 1; how often the token\n"
        "i + 2 positions on is the first guess of head i, or among its first five."
    )
    table.caption_justify = "left"
    return table


def sweep_table(sweep: Sweep) -> Table:
    title = labelled(f"K sweep: drafter {sweep.drafter}, temperature {sweep.temperature:g}", sweep.lossy)
    table = Table(title=title, title_justify="left")
    for heading in ("K", "tokens/s", "+-", "speedup", "95 %", "predicted", "accepted", "tokens/pass"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    fastest = max(row.tokens_per_second for row in sweep.rows)
    for row in sweep.rows:
        bar = "#" * round(12 * row.tokens_per_second / fastest)
        table.add_row(
            str(row.k),
            f"{row.tokens_per_second:.0f}",
            f"{row.spread:.0f}" if row.spread else "-",
            _times(row.speedup),
            _range(row.speedup_interval),
            _times(row.predicted_speedup),
            _share(row.acceptance_rate),
            _plain(row.mean_acceptance_length),
            bar + (" best" if row.k == sweep.best_k else ""),
            style="bold" if row.k == sweep.best_k else None,
        )
    return table


def break_it_table(result: BreakIt) -> Table:
    title = labelled(f"Break it: K = {result.k}, temperature {result.temperature:g}", result.lossy)
    table = Table(title=title, title_justify="left")
    table.add_column("drafter", no_wrap=True)
    for heading in ("tokens/s", "+-", "speedup", "95 %", "accepted", "alpha", "break-even", "tokens/pass", "c"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        style = None if row.cause is None or row.speedup >= 1 else "red"
        table.add_row(
            row.name,
            f"{row.tokens_per_second:.0f}",
            f"{row.spread:.0f}" if row.spread else "-",
            _times(row.speedup),
            _range(row.speedup_interval),
            _share(row.acceptance_rate),
            _plain(row.expected_acceptance),
            _plain(row.break_even_alpha),
            _plain(row.mean_acceptance_length),
            _plain(row.cost_ratio),
            style=style,
        )
    return table


def sweep_categories(sweep: Sweep) -> Table | None:
    """The categories of the prompts at the best K or, where that is plain decoding, at the fastest other one."""
    speculative = [row for row in sweep.rows if row.k > 0]
    if not speculative:
        return None
    fastest = max(speculative, key=lambda row: row.tokens_per_second)
    row = next((row for row in speculative if row.k == sweep.best_k), fastest)
    return _categories(labelled(f"By category: K = {row.k}", sweep.lossy and row.k > 0), [("", row.by_category)])


def break_it_categories(result: BreakIt) -> Table | None:
    """The categories of the prompts under each drafter."""
    return _categories(
        labelled(f"By category: K = {result.k}", result.lossy),
        [(row.name, row.by_category) for row in result.rows if row.name != "baseline"],
    )


def _categories(title: str, groups: Sequence[tuple[str, Sequence[CategoryFigures]]]) -> Table | None:
    if not any(figures for _, figures in groups):
        return None
    table = Table(title=title, title_justify="left")
    named = any(name for name, _ in groups)
    for heading in ("drafter", "category") if named else ("category",):
        table.add_column(heading, no_wrap=True)
    for heading in ("prompts", "tokens/s", "speedup", "95 %", "tokens/pass"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, figures in groups:
        for row in figures:
            table.add_row(
                *([name] if named else []),
                row.category or "(none)",
                str(row.num_prompts),
                f"{row.tokens_per_second:.0f}",
                _times(row.speedup),
                _range(row.speedup_interval),
                _plain(row.mean_acceptance_length),
            )
    return table


def generations_table(result: Generations) -> Table:
    """What generating from a file of prompts gave: all of them, and each category."""
    how = f"drafter {result.drafter}, K = {result.k}" if result.k else "plain decoding"
    title = labelled(f"Generated: {how}, temperature {result.temperature:g}", result.lossy)
    table = Table(title=title, title_justify="left")
    table.add_column("category", no_wrap=True)
    for heading in ("prompts", "tokens", "tokens/s", "end to end", "accepted", "tokens/pass"):
        table.add_column(heading, justify="right", no_wrap=True)

    def add(name: str, totals: Totals) -> None:
        table.add_row(
            name,
            f"{totals.num_prompts:,}",
            f"{totals.num_new_tokens:,}",
            _whole(totals.tokens_per_second),
            _whole(totals.end_to_end_tokens_per_second),
            _share(totals.acceptance_rate),
            _plain(totals.mean_acceptance_length),
        )

    for totals in result.by_category:
        add(totals.category or "(none)", totals)
    add("all", result.total)
    return table


def profile_table(found: Profile) -> Table:
    """Where a round goes, and how near each part is to its limit."""
    what = f"a round of K = {found.k}, {found.tokens_per_round:.2f} tokens" if found.k else "a plain step"
    table = Table(title=f"Profile: {what} (medians of {found.num_rounds})", title_justify="left")
    table.add_column("part", no_wrap=True)
    for heading in ("ms", "share", "limit ms", "of the limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    for part in (*found.parts, found.whole):
        limit = part.limit_seconds
        table.add_row(
            part.name,
            f"{part.seconds * 1e3:.3f}",
            _share(part.seconds / found.whole.seconds),
            f"{limit * 1e3:.3f}" if limit else "-",
            _share(limit / part.seconds) if limit else "-",
        )
    table.caption = (
        "limit: the time of summing as many bytes as each pass reads, with the same threads; caches may beat it"
    )
    table.caption_justify = "left"
    return table


def _range(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def print_tables(console: Console, *tables: Table | None) -> None:
    """Print those that there are."""
    for table in tables:
        if table is not None:
            print_table(console, table)


def print_table(console: Console, table: Table) -> None:
    """Print a table whole: where the terminal is too narrow, as one `heading: value` line a cell."""
    needed = console.measure(table, options=console.options.update_width(_UNLIMITED)).maximum
    if console.is_terminal and needed > console.width:
        headings = [str(column.header) for column in table.columns]
        console.print(str(table.title), style="bold")
        for cells in zip(*(column.cells for column in table.columns), strict=True):
            console.print(", ".join(f"{h or 'speed'}: {c}" for h, c in zip(headings, cells, strict=True) if c))
    else:
        console.print(table, soft_wrap=False)
