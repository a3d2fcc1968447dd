"""A verdict on a pair as tables: its parts, and the planted bugs with what saw each."""

from collections.abc import Callable

from specctl.experiments.verify.checks import PlantedRow
from specctl.experiments.verify.verdict import Finding, Verdict, wrong_words
from specctl.report.layout import Column, Sheet
from specctl.report.lossy import labelled


def verdict_table(verdict: Verdict) -> Sheet[Finding]:
    """One row a part."""
    title = (
        f"Verify: drafter {verdict.drafter}, rule {verdict.rule}, K = {verdict.k}, temperature {verdict.temperature:g}"
    )
    return Sheet(
        title=labelled(title, verdict.lossy),
        columns=(
            Column("part", lambda finding: finding.part, key=True, text=True),
            Column("holds", lambda finding: "yes" if finding.holds else "NO", text=True),
            Column("found", lambda finding: finding.text, wraps=True),
        ),
        rows=verdict.findings,
        style=lambda finding: None if finding.holds else "red",
        caption=f"Ran as generate does: {verdict.path}. Enumeration always runs step by step.",
    )


def planted_table(verdict: Verdict) -> Sheet[PlantedRow] | None:
    """One row a planted bug; None where none was planted."""
    if verdict.planted is None:
        return None

    def of_run(heading: str, cell: Callable[[PlantedRow], str], **how: bool) -> Column[PlantedRow]:
        """A column that says nothing of a bug that this pair cannot have."""
        return Column(heading, lambda row: "-" if row.missing else cell(row), **how)

    return Sheet(
        title="Planted bugs",
        columns=(
            Column("bug", lambda row: row.name + (" *" if row.keeps_law else ""), key=True, wraps=True),
            Column("verdict", _verdict, wraps=True),
            of_run("ran", lambda row: row.path, text=True, wraps=True),
            of_run("TV", lambda row: "-" if row.total_variation is None else f"{row.total_variation:.0e}"),
            of_run("rescore", lambda row: "holds" if row.rescore and row.rescore.holds else "wrong", text=True),
            of_run("p", _p_value),
            of_run("leak", _leak),
            of_run("greedy", lambda row: "same" if row.greedy and row.greedy.holds else "differs", text=True),
            of_run(
                "rescore found", lambda row: (row.rescore and wrong_words(row.rescore)) or "-", wraps=True, wide=True
            ),
        ),
        rows=verdict.planted,
        style=lambda row: None if row.as_expected else "red",
        caption=(
            "TV: total variation to the law by enumeration, on a toy pair; the rest ran on this pair. p: of the "
            "sampling law's tests together. Bugs marked * keep the law and cost acceptance."
        ),
    )


def _verdict(row: PlantedRow) -> str:
    if row.missing:
        return f"not here: needs {row.missing}"
    return "caught" if row.as_expected else f"NOT as it must be: {', '.join(row.must)}"


def _p_value(row: PlantedRow) -> str:
    assert row.sampling is not None  # what ran has figures
    return f"{row.sampling.p_value:.0e}" if row.sampling.p_value < 0.01 else f"{row.sampling.p_value:.2f}"


def _leak(row: PlantedRow) -> str:
    assert row.sampling is not None
    return "-" if row.sampling.leak is None else f"{row.sampling.leak.value:+.2f}"
