"""Results as rich tables: numbers never cut, plain text in a pipe."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from specctl.experiments.break_it import BreakIt
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
            f"{report['train_loss']:.3f}",
            f"{report['validation_loss']:.3f}",
            f"{report['own_validation_loss']:.3f}",
        )
    table.caption = (
        "Losses in nats a token: train in the loss trained with, validation cross-entropy on the target's text."
    )
    table.caption_justify = "left"
    return table


def sweep_table(sweep: Sweep) -> Table:
    table = Table(title=f"K sweep: drafter {sweep.drafter}, temperature {sweep.temperature:g}", title_justify="left")
    for heading in ("K", "tokens/s", "+-", "speedup", "predicted", "accepted", "tokens/pass"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    fastest = max(row.tokens_per_second for row in sweep.rows)
    for row in sweep.rows:
        bar = "#" * round(12 * row.tokens_per_second / fastest)
        table.add_row(
            str(row.k),
            f"{row.tokens_per_second:.0f}",
            f"{row.spread:.0f}",
            _times(row.speedup),
            _times(row.predicted_speedup),
            _share(row.acceptance_rate),
            _plain(row.mean_acceptance_length),
            bar + (" best" if row.k == sweep.best_k else ""),
            style="bold" if row.k == sweep.best_k else None,
        )
    return table


def break_it_table(result: BreakIt) -> Table:
    table = Table(title=f"Break it: K = {result.k}, temperature {result.temperature:g}", title_justify="left")
    table.add_column("drafter", no_wrap=True)
    for heading in ("tokens/s", "+-", "speedup", "accepted", "alpha", "break-even", "tokens/pass", "c"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        style = None if row.cause is None or row.speedup >= 1 else "red"
        table.add_row(
            row.name,
            f"{row.tokens_per_second:.0f}",
            f"{row.spread:.0f}",
            _times(row.speedup),
            _share(row.acceptance_rate),
            _plain(row.expected_acceptance),
            _plain(row.break_even_alpha),
            _plain(row.mean_acceptance_length),
            _plain(row.cost_ratio),
            style=style,
        )
    return table


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


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
