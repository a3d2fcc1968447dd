"""What the contenders gave, as rows and as a table."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.contenders import Contender, Measured, Run
from specctl.report.layout import Column, Sheet, make_console, print_tables


def rows_of(
    contenders: Sequence[Contender], measured: Sequence[Measured], to_text: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]]:
    """One row a contender that did not fail, by temperature; speedup over our plain decoding at the same one.

    same_text: at temperature 0, the share of prompts on which the text is our plain decoding's.
    """
    plain = {
        contender.temperature: found
        for contender, found in zip(contenders, measured, strict=True)
        if contender.name == "plain"
    }
    rows = []
    for contender, found in zip(contenders, measured, strict=True):
        if found.failure is not None:
            continue
        baseline = plain[contender.temperature]
        runs = zip(baseline.first_runs, found.first_runs, strict=True)
        same = [is_same(mine, theirs, to_text) for mine, theirs in runs]
        rows.append(
            {
                "name": contender.name,
                "temperature": contender.temperature,
                "threads": contender.threads,
                "tokens_per_second": found.tokens_per_second,
                "speedup": found.tokens_per_second / baseline.tokens_per_second,
                "tokens_per_pass": found.tokens_per_pass,
                "acceptance_rate": found.acceptance_rate,
                "same_text": sum(same) / len(same) if contender.temperature == 0 else None,
                "num_runs": len(found.seconds_per_token),
            }
        )
    return sorted(rows, key=lambda row: row["temperature"])


def is_same(mine: Run, theirs: Run, to_text: Callable[[Sequence[int]], str]) -> bool:
    """Whether a request's ids are ours, or its text where it has no ids: less the half of a character at its end."""
    assert mine.token_ids is not None
    if theirs.token_ids is not None:
        return theirs.token_ids == mine.token_ids
    return (theirs.text or "").rstrip("\ufffd") == to_text(mine.token_ids).rstrip("\ufffd")


def print_result(result: dict[str, Any]) -> None:
    """The table, on stderr."""
    table: Sheet[dict[str, Any]] = Sheet(
        title=f"{result['new_tokens']} new tokens, {result['num_prompts']} prompts",
        columns=(
            Column("T", lambda row: f"{row['temperature']:g}", key=True),
            Column("decoding", lambda row: row["name"], key=True, text=True),
            Column("threads", lambda row: f"{row['threads']}"),
            Column("tokens/s", lambda row: f"{row['tokens_per_second']:.0f}"),
            Column("over\nplain", lambda row: f"{row['speedup']:.2f}x"),
            Column("tokens/\npass", lambda row: _or_dash(row["tokens_per_pass"], "{:.2f}")),
            Column("accepted", lambda row: _or_dash(row["acceptance_rate"], "{:.0%}")),
            Column("text of\nplain", lambda row: _or_dash(row["same_text"], "{:.0%}")),
        ),
        rows=result["rows"],
    )
    print_tables(make_console(stderr=True), table, wide=True)
    for name, reason in result["skipped"].items():
        print(f"without {name}: {reason}", file=sys.stderr)
    if "limit" in result:
        limit, costs = result["limit"], result["verify_cost"]
        print(
            f"limit {limit['tokens_per_second']:.0f} tokens/s ({limit['weight_bytes'] / 1e6:.0f} MB at "
            f"{limit['bytes_per_second'] / 1e9:.1f} GB/s), of which plain reaches {limit['plain_share']:.0%}\n"
            f"target step {result['target_step_ms']:.2f} ms, draft step {result['draft_step_ms']:.2f} ms, "
            + ", ".join(f"v({rows}) = {cost:.2f}" for rows, cost in costs.items()),
            file=sys.stderr,
        )


def _or_dash(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
