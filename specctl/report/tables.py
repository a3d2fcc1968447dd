"""Results as tables, each declared column by column, the most important first; `layout` says how many are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from specctl.report.conclusions import in_steps
from specctl.report.layout import Column, Sheet
from specctl.report.lossy import labelled

if TYPE_CHECKING:  # they import torch, which `inspect` does without
    from specctl.experiments.break_it import BreakIt, BreakRow
    from specctl.experiments.generate_file import Generations, Totals
    from specctl.experiments.intervals import CategoryFigures, Interval
    from specctl.experiments.profile import Part, Profile
    from specctl.experiments.sweep_k import Sweep, SweepRow

Report = Mapping[str, Any]  # of a training


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


def _predicted(row: SweepRow | BreakRow) -> str:
    """Marked where it and the measurement are further apart than their intervals explain."""
    return _times(row.predicted_speedup) + ("!" if row.prediction_agrees is False else "")


def _title(what: str, result: Sweep | BreakIt) -> str:
    """With how texts ended, where that is not how a user's do."""
    return f"{what}, temperature {result.temperature:g}" + (", end tokens ignored" if result.ignores_eos else "")


# Of rows that were measured: K, drafters, categories
_SPEED: Column[Any] = Column("tokens/s", lambda row: _whole(row.tokens_per_second))
_SPREAD: Column[Any] = Column("+-", lambda row: f"{row.spread:.0f}" if row.spread else "-", wide=True)
_SPEEDUP: Column[Any] = Column("speedup", lambda row: _times(row.speedup))
_SPEEDUP_INTERVAL: Column[Any] = Column("95 %", lambda row: _range(row.speedup_interval))
_PREDICTED: Column[Any] = Column("predicted", lambda row: _predicted(row))
_PREDICTED_INTERVAL: Column[Any] = Column("predicted\n95 %", lambda row: _range(row.predicted_interval), wide=True)
_ACCEPTED: Column[Any] = Column("accepted", lambda row: _share(row.acceptance_rate))
_LENGTH: Column[Any] = Column("tokens/\npass", lambda row: _plain(row.mean_acceptance_length))
_CATEGORY: Column[Any] = Column("category", lambda row: row.category or "(none)", key=True, text=True)

# Of reports of training
_MODEL: Column[Report] = Column("model", lambda report: report["name"], key=True, text=True)
_PARAMETERS: Column[Report] = Column("parameters", lambda report: f"{report['num_parameters']:,}", rank=1)
_LOSS: Column[Report] = Column("loss", lambda report: report["loss"], rank=1)
_TRAINED_TOKENS: Column[Report] = Column("tokens", lambda report: f"{report['tokens']:,}", rank=2)
_TRAINED_SECONDS: Column[Report] = Column("seconds", lambda report: f"{report['seconds']:.0f}", rank=2)
_TRAIN_LOSS: Column[Report] = Column("train", lambda report: _loss(report["train_loss"]), rank=1)


def sweep_table(sweep: Sweep) -> Sheet[SweepRow]:
    fastest = max(row.tokens_per_second for row in sweep.rows)

    def mark(row: SweepRow) -> str:
        return "best" if row.k == sweep.best_k else "best?" if row.k in sweep.undecided else ""

    return Sheet(
        title=labelled(_title(f"K sweep: drafter {sweep.drafter}", sweep), sweep.lossy),
        columns=(
            Column("K", lambda row: str(row.k), key=True),
            _SPEEDUP,
            _SPEEDUP_INTERVAL,
            _PREDICTED,
            _ACCEPTED,
            _LENGTH,
            _SPEED,
            _PREDICTED_INTERVAL,
            _SPREAD,
            Column("repeats", lambda row: f"{row.num_repeats}{' fresh' if row.is_fresh else ''}", wide=True),
            Column("speed", lambda row: "#" * round(12 * row.tokens_per_second / fastest), text=True, wide=True),
            Column("", mark, text=True),
        ),
        rows=sweep.rows,
        style=lambda row: "bold" if row.k == sweep.best_k else None,
    )


def break_it_table(result: BreakIt) -> Sheet[BreakRow]:
    return Sheet(
        title=labelled(_title(f"Break it: K = {result.k}", result), result.lossy),
        columns=(
            Column("drafter", lambda row: row.name, key=True, text=True),
            _SPEEDUP,
            _SPEEDUP_INTERVAL,
            _ACCEPTED,
            Column("alpha", lambda row: _plain(row.expected_acceptance)),
            Column("break-\neven", lambda row: _plain(row.break_even_alpha)),
            _LENGTH,
            Column("c", lambda row: "-" if row.cost_ratio is None else in_steps(row.cost_ratio)),
            _SPEED,
            Column("predicted", _predicted, wide=True),
            _PREDICTED_INTERVAL,
            Column("round\ncost", lambda row: _plain(row.round_cost), wide=True),
            _SPREAD,
        ),
        rows=result.rows,
        style=lambda row: "red" if row.pays is False else None,
    )


def sweep_categories(sweep: Sweep) -> Sheet[Any] | None:
    """The categories of the prompts at the best K or, where that is plain decoding, at the fastest other one."""
    speculative = [row for row in sweep.rows if row.k > 0]
    if not speculative:
        return None
    fastest = max(speculative, key=lambda row: row.tokens_per_second)
    row = next((row for row in speculative if row.k == sweep.best_k), fastest)
    return _categories(labelled(f"By category: K = {row.k}", sweep.lossy and row.k > 0), {"": row.by_category})


def break_it_categories(result: BreakIt) -> Sheet[Any] | None:
    """The categories of the prompts under each drafter."""
    groups = {row.name: row.by_category for row in result.rows if row.name != "baseline"}
    return _categories(labelled(f"By category: K = {result.k}", result.lossy), groups)


def _categories(title: str, groups: Mapping[str, Sequence[CategoryFigures]]) -> Sheet[Any] | None:
    """groups: by drafter, "" for the one that the title names."""
    rows = [SimpleNamespace(drafter=name, **asdict(row)) for name, rows in groups.items() for row in rows]
    if not rows:
        return None
    drafter: Column[Any] = Column("drafter", lambda row: row.drafter, key=True, text=True)
    prompts: Column[Any] = Column("prompts", lambda row: str(row.num_prompts))
    figures = (_CATEGORY, _SPEEDUP, _SPEEDUP_INTERVAL, _LENGTH, prompts, _SPEED)
    return Sheet(title=title, columns=(drafter, *figures) if any(groups) else figures, rows=rows)


def training_table(reports: Sequence[Report]) -> Sheet[Report]:
    return Sheet(
        title="Training",
        columns=(
            *(_MODEL, _PARAMETERS, _LOSS, _TRAINED_TOKENS, _TRAINED_SECONDS, _TRAIN_LOSS),
            Column("validation", lambda report: _loss(report["validation_loss"])),
            Column("own text", lambda report: _loss(report["own_validation_loss"])),
        ),
        rows=reports,
        caption=(
            "Losses in nats a token: train in the loss trained with, validation cross-entropy on the target's text."
        ),
    )


def heads_table(reports: Sequence[Report]) -> Sheet[tuple[Report, int]]:
    """Medusa heads: how long their chains would be, and how often each is right; a row for each head."""

    def once(column: Column[Report]) -> Column[tuple[Report, int]]:
        """A fact of all heads together, beside the first of them."""
        return Column(
            column.heading,
            lambda row: "" if row[1] else column.cell(row[0]),
            key=column.key,
            rank=column.rank,
            text=column.text,
        )

    def share(guesses: int) -> Column[tuple[Report, int]]:
        return Column(f"top-{guesses}", lambda row: _share(row[0]["figures"][f"head_{row[1]}_top_{guesses}"]))

    length: Column[Report] = Column(
        "tokens/\npass", lambda report: _plain(report["figures"]["expected_acceptance_length"])
    )
    facts = (_MODEL, _PARAMETERS, _LOSS, _TRAINED_TOKENS, _TRAINED_SECONDS, _TRAIN_LOSS, length)
    return Sheet(
        title="Medusa heads",
        columns=(*map(once, facts), Column("head", lambda row: str(row[1]), key=True), share(1), share(5)),
        rows=[
            (report, head)
            for report in reports
            for head in range(sum(name.endswith("_top_1") for name in report["figures"]))
        ],
        caption=(
            "On validation text: tokens a pass expected at temperature 1; how often the token i + 2 positions on is "
            "the first guess of head i, or among its first five."
        ),
    )


def generations_table(result: Generations) -> Sheet[Totals]:
    """What generating from a file of prompts gave: all of them, and each category."""
    how = f"drafter {result.drafter}, K = {result.k}" if result.k else "plain decoding"
    return Sheet(
        title=labelled(f"Generated: {how}, temperature {result.temperature:g}", result.lossy),
        columns=(
            Column(
                "category", lambda row: "all" if row is result.total else row.category or "(none)", key=True, text=True
            ),
            Column("prompts", lambda row: f"{row.num_prompts:,}"),
            Column("tokens", lambda row: f"{row.num_new_tokens:,}"),
            *(_SPEED, _LENGTH, _ACCEPTED),
            Column("end to end", lambda row: _whole(row.end_to_end_tokens_per_second)),
        ),
        rows=[*result.by_category, result.total],
    )


def profile_table(found: Profile) -> Sheet[Part]:
    """Where a round goes, and how near each part is to its limit."""
    what = f"a round of K = {found.k}, {found.tokens_per_round:.2f} tokens" if found.k else "a plain step"
    return Sheet(
        title=f"Profile: {what} (medians of {found.num_rounds})",
        columns=(
            Column("part", lambda part: part.name, key=True, text=True),
            Column("ms", lambda part: f"{part.seconds * 1e3:.3f}"),
            Column("share", lambda part: _share(part.seconds / found.whole.seconds)),
            Column("limit ms", lambda part: f"{part.limit_seconds * 1e3:.3f}" if part.limit_seconds else "-"),
            Column(
                "of the limit", lambda part: _share(part.limit_seconds / part.seconds) if part.limit_seconds else "-"
            ),
        ),
        rows=[*found.parts, found.whole],
        caption=(
            "limit: the time of summing as many bytes as each pass reads, with the same threads; caches may beat it"
        ),
    )
