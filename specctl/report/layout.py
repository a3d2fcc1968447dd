"""How a table is shown: those of its columns that a width has room for, the most important ones first.

A table declares its columns once, the most important ones first, and its rows; how wide it may be is decided here.
By default that is 80 columns, on a terminal and in a pipe alike, so that both show the same. Numbers are never cut:
where there is no room a whole column is left out, and a line below says that --wide shows it. Knows nothing about
what a table is about.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

WIDTH = 80  # of a table without --wide, and of captions in a pipe
NARROWEST = 60  # a terminal that is narrower gets lines instead of a table
_GAP = 2  # between columns
_LEAST_TEXT = 18  # columns that a text which wraps can do with

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """cell: what it says of a row. The heading may have two lines; marks, such as `best`, need none.

    key: names the row, is never left out, and folds where it is longer than a whole line. rank: columns of a higher
    one are left out first, and of equal ones the last. wide: shown with --wide alone. text: aligned to the left.
    wraps: a text of any length, over as many lines as it takes.
    """

    heading: str
    cell: Callable[[Row], str]
    key: bool = False
    rank: int = 0
    wide: bool = False
    text: bool = False
    wraps: bool = False

    @property
    def name(self) -> str:
        """What it is called in a line."""
        return re.sub(r"(?<=[/-])\n", "", self.heading).replace("\n", " ") or "marks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet(Generic[Row]):
    """A table before it is laid out. style: of a row, in rich's words."""

    title: str
    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    caption: str = ""
    style: Callable[[Row], str | None] = lambda row: None


def make_console(stderr: bool = False) -> Console:
    """A console for results (stdout) or narration (stderr); in a pipe text that is not a table has no width."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def print_tables(console: Console, *sheets: Sheet[Any] | None, wide: bool = False) -> None:
    """Print those that there are. wide: every column, however wide the table gets."""
    given = [sheet for sheet in sheets if sheet is not None]
    for at, sheet in enumerate(given):
        if at:
            console.print()
        _print_table(console, sheet, wide)


def print_lines(console: Console, lines: Sequence[str]) -> None:
    """Print sentences, broken between words at the console's width; what is indented stays so."""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        for part in Text(line.strip()).wrap(console, console.width - indent):
            _print(console, Text(" " * indent) + part, console.width)


def _print_table(console: Console, sheet: Sheet[Any], wide: bool) -> None:
    """As a table, or, where a terminal has no room for one, as a line of `heading: value` for each row."""
    filled = [_Filled.of(column, sheet.rows) for column in sheet.columns if wide or not column.wide]
    room = console.width if wide else min(console.width, WIDTH)
    in_lines = console.is_terminal and (console.width < NARROWEST or (wide and _width(filled) > room))
    shown = filled if wide or in_lines else _fitting(filled, room)

    def say(text: str, style: str = "") -> None:
        if text:
            _print(console, Text(text, style), room)

    say(sheet.title, "table.title")
    if in_lines:
        for row, *cells in zip(sheet.rows, *(each.cells for each in shown), strict=True):
            headed = zip((each.column for each in shown), cells, strict=True)
            parts = [f"{column.name}: {cell}" if column.heading else cell for column, cell in headed if cell]
            say(_joined(parts, console.width), sheet.style(row) or "")
    else:
        needed = sum(each.longest for each in shown) + _GAP * (len(shown) - 1)
        width = needed if wide and not console.is_terminal else min(needed, room)
        _print(console, _table(sheet, shown, width), width)
    say(sheet.caption, "table.caption")
    kept = [each.column for each in shown]
    say(_left_out([column.name for column in sheet.columns if column not in kept]), "table.caption")


@dataclass(frozen=True, slots=True)
class _Filled:
    """A column and its cells, one a row. longest: the columns that it would take in one line."""

    column: Column[Any]
    cells: list[str]
    longest: int

    @classmethod
    def of(cls, column: Column[Row], rows: Sequence[Row]) -> "_Filled":
        cells = [column.cell(row) for row in rows]
        lines = [line for text in (column.heading, *cells) for line in text.split("\n")]
        return cls(column, cells, max(map(cell_len, lines)))

    @property
    def least(self) -> int:
        """The columns that it can do with."""
        return min(self.longest, _LEAST_TEXT) if self.column.wraps else self.longest


def _width(columns: Sequence[_Filled]) -> int:
    return sum(each.least for each in columns) + _GAP * (len(columns) - 1)


def _fitting(columns: Sequence[_Filled], room: int) -> list[_Filled]:
    """The most important columns that fit: all keys, and one more in any case."""
    shown = list(columns)
    while _width(shown) > room:
        spare = [at for at, each in enumerate(shown) if not each.column.key]
        if len(spare) < 2:
            break
        del shown[max(spare, key=lambda at: (shown[at].column.rank, at))]
    return shown


def _table(sheet: Sheet[Any], columns: Sequence[_Filled], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), width=width)
    folds, most = _width(columns) > width, max(each.column.heading.count("\n") for each in columns)
    for each in columns:
        column = each.column
        table.add_column(
            Text("\n" * (most - column.heading.count("\n")) + column.heading),  # those of one line stand below
            justify="left" if column.text or column.wraps else "right",
            no_wrap=not (column.wraps or (folds and column.key)),
            overflow="fold",
        )
    for at, row in enumerate(sheet.rows):
        table.add_row(*(Text(each.cells[at]) for each in columns), style=sheet.style(row))
    return table


def _print(console: Console, shown: Text | Table, width: int) -> None:
    """Without blanks at the ends of lines."""
    for line in console.render_lines(shown, console.options.update_width(width), pad=False):
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
        console.print(Segments([*line, Segment.line()]), end="")


def _joined(parts: Sequence[str], room: int) -> str:
    """Parts after each other, and below each other where a line is full, so that none is broken that fits in one."""
    lines = [parts[0]]
    for part in parts[1:]:
        if cell_len(f"{lines[-1]}, {part},") <= room:
            lines[-1] += f", {part}"
        else:
            lines[-1] += ","
            lines.append(f"  {part}")
    return "\n".join(lines)


def _left_out(names: Sequence[str]) -> str:
    if not names:
        return ""
    *first, last = names
    return f"--wide also shows {', '.join(first)}{' and ' if first else ''}{last}."
