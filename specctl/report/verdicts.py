"""A verdict on a pair as rich tables: its parts, and the planted bugs with what saw each."""

from rich.table import Table

from specctl.experiments.verify.checks import PlantedRow
from specctl.experiments.verify.verdict import Verdict, wrong_words
from specctl.report.lossy import labelled


def verdict_table(verdict: Verdict) -> Table:
    """One row a part."""
    title = (
        f"Verify: drafter {verdict.drafter}, rule {verdict.rule}, K = {verdict.k}, temperature {verdict.temperature:g}"
    )
    table = Table(title=labelled(title, verdict.lossy), title_justify="left")
    for heading in ("part", "holds", "found"):
        table.add_column(heading, no_wrap=True)
    for finding in verdict.findings:
        style = None if finding.holds else "red"
        table.add_row(finding.part, "yes" if finding.holds else "NO", finding.text, style=style)
    return table


def planted_table(verdict: Verdict) -> Table | None:
    """One row a planted bug; None where none was planted."""
    if verdict.planted is None:
        return None
    table = Table(title="Planted bugs", title_justify="left")
    table.add_column("bug", no_wrap=True)
    table.add_column("TV", justify="right", no_wrap=True)
    table.add_column("rescore", no_wrap=True)
    table.add_column("p", justify="right", no_wrap=True)
    table.add_column("leak", justify="right", no_wrap=True)
    table.add_column("greedy", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in verdict.planted:
        table.add_row(*_cells(row), style=None if row.as_expected else "red")
    table.caption = (
        "TV: total variation to the law by enumeration, on a toy pair; the rest ran on this pair. p: of the sampling\n"
        "law's tests together. Bugs marked * keep the law and cost acceptance."
    )
    table.caption_justify = "left"
    return table


def _cells(row: PlantedRow) -> list[str]:
    name = row.name + (" *" if row.keeps_law else "")
    if row.missing or row.rescore is None or row.sampling is None or row.greedy is None:
        return [name, "-", "-", "-", "-", "-", f"not here: needs {row.missing}"]
    leak = row.sampling.leak
    return [
        name,
        f"{row.total_variation:.0e}",
        wrong_words(row.rescore) or "holds",
        f"{row.sampling.p_value:.0e}" if row.sampling.p_value < 0.01 else f"{row.sampling.p_value:.2f}",
        "-" if leak is None else f"{leak.value:+.2f}",
        "same" if row.greedy.holds else "differs",
        "caught" if row.as_expected else f"NOT as it must be: {', '.join(row.must)}",
    ]
