"""Tables at every width: what fits is whole, what is left out is named, and a pipe shows what a terminal does."""

import re
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from tiny_run import Tiny, specctl

from specctl.cli.commands import app
from specctl.experiments.break_it import BreakIt, BreakRow
from specctl.experiments.generate_file import Generations, Totals
from specctl.experiments.inspect import Inspection, ModelFacts
from specctl.experiments.intervals import CategoryFigures
from specctl.experiments.profile import Part, Profile
from specctl.experiments.sweep_k import Sweep, SweepRow
from specctl.experiments.verify.checks import PlantedRow
from specctl.experiments.verify.greedy import GreedyFigures
from specctl.experiments.verify.rescore import RescoreFigures
from specctl.experiments.verify.sampling_law import Leak, SamplingFigures
from specctl.experiments.verify.verdict import Finding, Verdict
from specctl.report.inspection import models_table
from specctl.report.layout import Column, Sheet, make_console, print_tables
from specctl.report.tables import (
    break_it_categories,
    break_it_table,
    generations_table,
    heads_table,
    profile_table,
    sweep_categories,
    sweep_table,
    training_table,
)
from specctl.report.verdicts import planted_table, verdict_table

CATEGORIES = [
    CategoryFigures(
        category=name,
        num_prompts=80,
        tokens_per_second=1234.5,
        speedup=1.75,
        speedup_interval=(1.65, 1.88),
        mean_acceptance_length=3.59,
    )
    for name in ("multi_turn", "translation", None)
]
SWEEP = Sweep(
    drafter="distilled",
    temperature=1.0,
    rows=[
        SweepRow(
            k=k,
            tokens_per_second=98765 + k,
            spread=4321.0,
            speedup=2.34 + k,
            predicted_speedup=5.67 + k,
            acceptance_rate=0.87,
            mean_acceptance_length=9.87,
            speedup_interval=(1.23, 4.56),
            by_category=CATEGORIES,
        )
        for k in (0, 4, 8)
    ],
    best_k=8,
    cost_ratio=0.1,
    verify_cost={1: 1.0},
    overhead={},
    conditional_acceptance=[],
)


def break_it(*names: str) -> BreakIt:
    row = {
        "tokens_per_second": 98765.0,
        "spread": 4321.0,
        "by_category": CATEGORIES,
        "cause": "agreement",
        "pays": False,
    }
    measured = {"acceptance_rate": 0.68, "expected_acceptance": 0.84, "break_even_alpha": 0.46, "cost_ratio": 0.04}
    figures: dict[str, Any] = row | measured | {"mean_acceptance_length": 3.59, "speedup_interval": (0.71, 0.93)}
    return BreakIt(k=4, temperature=0.8, rows=[BreakRow(name=name, speedup=0.79, **figures) for name in names])


REPORTS = [
    {
        "name": name,
        "num_parameters": 134_515_008,
        "loss": "ce",
        "tokens": 4_608_000,
        "seconds": 2150.4,
        "train_loss": 4.188,
        "validation_loss": 4.302,
        "own_validation_loss": 4.302,
        "figures": {"expected_acceptance_length": 1.83}
        | {f"head_{head}_top_{n}": 0.11 * n for head in range(4) for n in (1, 5)},
    }
    for name in ("target", "mismatched")
]
TOTALS = Totals(
    category="translation",
    num_prompts=1480,
    num_new_tokens=1_378_880,
    tokens_per_second=1234.0,
    end_to_end_tokens_per_second=1111.0,
    acceptance_rate=0.68,
    mean_acceptance_length=3.59,
)
GENERATIONS = Generations(
    output=None,
    num_found=0,
    generations=[],
    drafter="distilled",
    k=4,
    temperature=1.0,
    total=TOTALS,
    by_category=[TOTALS, TOTALS],
)
PARTS = [Part(name="draft, 4 tokens", seconds=0.00123, limit_seconds=0.00045), Part(name="bookkeeping", seconds=0.1)]
FOUND = (
    "19,712 rows of p within 3e-07, 12,345 of q within 2e-07 (tolerance 1e-04); 12 rows of p wrong, 3 rows of q wrong"
)
RESCORED = RescoreFigures(tolerance=1e-4, num_p=100, num_wrong_p=12, num_wrong_q=3, num_short=7)
PLANTED = PlantedRow(
    name="positions off by one after a rollback",
    keeps_law=True,
    must=("enumeration", "sampling law"),
    total_variation=3.2e-1,
    rescore=RESCORED,
    sampling=SamplingFigures(num_tokens=9, tests=[], leak=Leak(value=0.123, interval=(0.1, 0.2), smallest_seen=0.1)),
    greedy=GreedyFigures(num_runs=1, num_tokens=9, drafters=["distilled"], differences=[]),
    as_expected=False,
)
VERDICT = Verdict(
    path="draws and rule in the kernel",
    drafter="distilled",
    rule="typical",
    lossy=True,
    k=4,
    temperature=1.0,
    holds=False,
    all_caught=False,
    findings=[Finding(part="sampling law", holds=False, text=FOUND), Finding(part="greedy", holds=True, text="same")],
    planted=[
        PLANTED,
        PlantedRow(name="a lost bonus token", keeps_law=True, must=("rescore",), missing="a draft model"),
    ],
    false_alarm_rate=1e-3,
    seconds=1.0,
    note=None,
)
INSPECTION = Inspection(
    run_dtype="bfloat16",
    models=[
        ModelFacts(
            name=name,
            folder="/models/x",
            architecture=architecture,
            num_parameters=70_553_706_496,
            bytes_on_disk=141_107_412_992,
            bytes_in_run=140_000_000_000,
            dtype="bfloat16",
            kv_bytes_per_token=327_680,
            kv_dtype=kv_dtype,
            context_length=131_072,
            num_entries=128_256,
            num_rows=128_256,
            num_padding_rows=12_345,
            hidden_size=8192,
            storage=[],
        )
        for name, architecture, kv_dtype in (
            ("target", "LlamaForCausalLM", "float32"),
            ("mismatched", "Qwen3MoeForCausalLM", "bfloat16"),
        )
    ],
    pairs=[],
    can_speculate=True,
)
DRAFTERS = ("baseline", "aligned", "mismatched", "ngram")
SHEETS: dict[str, Sheet[Any] | None] = {
    "sweep": sweep_table(SWEEP),
    "sweep by category": sweep_categories(SWEEP),
    "break-it": break_it_table(break_it(*DRAFTERS)),
    "break-it by category": break_it_categories(break_it(*DRAFTERS)),
    "training": training_table(REPORTS),
    "heads": heads_table([{**report, "loss": "acceptance"} for report in REPORTS]),
    "generations": generations_table(GENERATIONS),
    "profile": profile_table(Profile(k=4, num_rounds=123, tokens_per_round=3.59, parts=PARTS)),
    "verdict": verdict_table(VERDICT),
    "planted": planted_table(VERDICT),
    "models": models_table(INSPECTION),
}
WIDTHS = (40, 59, 60, 80, 120)


@pytest.fixture(params=SHEETS)
def sheet(request: pytest.FixtureRequest) -> Sheet[Any]:
    found = SHEETS[request.param]
    assert found is not None
    return found


def on_terminal(sheet: Sheet[Any], columns: int, wide: bool = False) -> str:
    file = StringIO()
    environment = {"COLUMNS": str(columns)}
    console = Console(file=file, force_terminal=True, color_system=None, highlight=False, _environ=environment)
    print_tables(console, sheet, wide=wide)
    return file.getvalue()


def in_pipe(sheet: Sheet[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **how: bool) -> str:
    monkeypatch.setenv("COLUMNS", "40")  # of the terminal that the pipe is written in
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    print_tables(make_console(), sheet, **how)
    return capsys.readouterr().out


def words(*texts: str) -> set[str]:
    """Numbers and words; names of columns too, whose headings may have two lines."""
    return {word.strip(",:") for text in texts for word in re.split(r"\s+|(?<=/)|(?<=-)(?=[a-z])", text)} - {""}


def left_out(shown: str) -> list[str]:
    """The names in the line that says so."""
    found = re.search(r"--wide also shows (.*)\.\n$", shown, flags=re.DOTALL)
    return re.split(r", | and ", " ".join(found[1].split())) if found else []


def cells_of(sheet: Sheet[Any], columns: Sequence[Column[Any]]) -> list[str]:
    return [column.cell(row) for column in columns for row in sheet.rows]


def check(sheet: Sheet[Any], shown: str) -> None:
    """Nothing is cut, and each column is there whole or named as left out."""
    assert "…" not in shown and "..." not in shown
    missing = left_out(shown)
    assert set(missing) <= {column.name for column in sheet.columns}
    kept = [column for column in sheet.columns if column.name not in missing]
    assert words(*cells_of(sheet, kept)) <= words(shown)
    source = words(sheet.title, sheet.caption, *cells_of(sheet, kept), *(column.name for column in kept))
    own = words("--wide also shows and . ─", *(f"{name}." for name in missing), *missing)
    extra = {word for word in words(shown.replace("─", "")) if word not in source | own}
    assert not extra, extra


def test_the_cost_of_a_lookup_is_shown() -> None:
    result = break_it("ngram")
    sheet = break_it_table(replace(result, rows=[replace(result.rows[0], cost_ratio=0.0021)]))
    assert "2e-3" in [column.cell(sheet.rows[0]) for column in sheet.columns if column.heading == "c"]


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_terminal_of_any_width(sheet: Sheet[Any], columns: int) -> None:
    shown = on_terminal(sheet, columns)
    check(sheet, shown)
    assert max(map(len, shown.splitlines())) <= min(columns, 80 if columns >= 60 else columns)
    assert ("─" in shown) == (columns >= 60)
    wide = [column.name for column in sheet.columns if column.wide]
    if columns < 60:
        assert left_out(shown) == wide
    if columns == 120:
        assert shown == on_terminal(sheet, 80)


def test_a_pipe_shows_what_a_terminal_of_80_columns_does(
    sheet: Sheet[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_pipe(sheet, monkeypatch, capsys) == on_terminal(sheet, 80)


def test_wide_in_a_pipe_has_every_column_and_a_line_a_row(
    sheet: Sheet[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = in_pipe(sheet, monkeypatch, capsys, wide=True)
    check(sheet, shown)
    assert not left_out(shown) and "─" in shown
    below = shown.partition("─\n")[2].splitlines()
    for line, row in zip(below, sheet.rows, strict=False):
        assert all(column.cell(row) in line for column in sheet.columns)


@pytest.mark.parametrize("columns", WIDTHS)
def test_wide_on_a_terminal_has_every_column(sheet: Sheet[Any], columns: int) -> None:
    """As a table where there is room, or else in lines."""
    shown = on_terminal(sheet, columns, wide=True)
    check(sheet, shown)
    assert not left_out(shown) and max(map(len, shown.splitlines())) <= columns


def headings(shown: str) -> list[str]:
    """The columns of a table, by the ends of their headings."""
    upper, lower, *_ = shown.splitlines()[1:]
    return re.split(r"  +", (lower if "─" not in lower else upper).strip())


def test_the_columns_that_matter_most_fit_80() -> None:
    swept, broken, models = (on_terminal(SHEETS[name], 80) for name in ("sweep", "break-it", "models"))  # type: ignore[arg-type]
    assert headings(swept) == ["K", "speedup", "95 %", "predicted", "accepted", "pass", "tokens/s"]
    assert "best" in swept and left_out(swept) == ["predicted 95 %", "+-", "repeats", "speed"]
    expected = ["drafter", "speedup", "95 %", "accepted", "alpha", "even", "pass", "c"]
    assert headings(broken)[: len(expected)] == expected
    assert headings(models) == ["model", "architecture", "parameters", "bfloat16", "token", "context", "tokens"]
    assert "The cache of target is in float32, in which the kernel computes." in models
    for name in ("training", "generations", "profile", "verdict", "break-it by category", "sweep by category"):
        assert left_out(on_terminal(SHEETS[name], 80)) == []  # type: ignore[arg-type]


def test_60_columns_leave_out_the_least_important_first() -> None:
    swept, trained = (on_terminal(SHEETS[name], 60) for name in ("sweep", "training"))  # type: ignore[arg-type]
    assert headings(swept) == ["K", "speedup", "95 %", "predicted", "accepted", "pass"]
    assert left_out(swept) == ["tokens/s", "predicted 95 %", "+-", "repeats", "speed", "marks"]
    assert {"tokens", "seconds"} <= set(left_out(trained)) and headings(trained)[-1] != "seconds"


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("length", [30, 45, 70, 200])
def test_long_names_cost_columns_and_fold_at_last(columns: int, length: int) -> None:
    name = ("drafter_of_" * 20)[:length]
    shown = on_terminal(break_it_table(break_it("baseline", name)), columns)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns and "…" not in shown
    assert headings(shown)[:2] == ["drafter", "speedup"] and shown.count("0.79x") == 2
    rows = "".join(
        line[: length + 2].split("  ")[0].strip()
        for line in lines[lines.index(next(x for x in lines if "baseline" in x)) + 1 : -1]
    )
    assert name in rows
    assert len(left_out(shown)) > len(left_out(on_terminal(break_it_table(break_it("baseline")), columns)))


def test_a_long_architecture_is_left_out() -> None:
    odd = replace(INSPECTION, models=[replace(model, architecture="A" * 70) for model in INSPECTION.models])
    shown = on_terminal(models_table(odd), 60)
    assert max(map(len, shown.splitlines())) <= 60 and "70,553,706,496" in shown and "architecture" in left_out(shown)


def test_names_are_shown_as_they_are() -> None:
    odd = ["[red]x[/red]", ":smile:", "漢字の名前", "[/]"]
    shown = on_terminal(break_it_table(break_it(*odd)), 80)
    assert all(name in shown for name in odd)


def test_a_column_of_a_higher_rank_goes_before_what_stands_behind_it() -> None:
    columns = [Column("name", str, key=True), *(Column(c * 10, str, rank=c == "b") for c in "abc")]
    shown = on_terminal(Sheet(title="t", columns=columns, rows=["x" * 30]), 80)  # type: ignore[arg-type]
    assert "a" * 10 in shown and left_out(shown) == ["b" * 10, "c" * 10]
    shown = on_terminal(Sheet(title="t", columns=columns, rows=["x" * 15]), 80)  # type: ignore[arg-type]
    assert left_out(shown) == []
    shown = on_terminal(Sheet(title="t", columns=columns, rows=["x" * 20]), 80)  # type: ignore[arg-type]
    assert left_out(shown) == ["b" * 10]


# The commands


def test_every_command_with_a_table_takes_wide() -> None:
    for command in app.registered_commands:
        assert command.name and "--wide" in specctl(command.name, "--help").out


def test_the_flag_reaches_the_table(tiny: Tiny) -> None:
    for command in ("sweep-k", "break-it"):
        narrow, wide = tiny.specctl(command), tiny.specctl(command, "--wide")
        assert narrow.code == wide.code == 0
        assert "--wide also shows" in narrow.out and "--wide" not in wide.out
        assert " +-" in wide.out.splitlines()[2] and " +-" not in narrow.out.splitlines()[2]
        table = narrow.out[: narrow.out.index("--wide")].splitlines()
        assert max(map(len, table)) <= 80
    for command in ("train-medusa", "inspect", "verify"):
        more = ("--tokens", "50") if command == "verify" else ()
        assert "--wide also" not in tiny.specctl(command, "--wide", *more).out
