"""What a sweep and a comparison say, in sentences: each follows from figures and intervals, and claims no more.

A person reads them below the table, a machine in the JSON's `conclusions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they import torch
    from specctl.experiments.break_it import BreakIt, BreakRow
    from specctl.experiments.intervals import Interval
    from specctl.experiments.measure import Disturbance
    from specctl.experiments.sweep_k import Sweep, SweepRow


def sweep_conclusions(sweep: Sweep) -> list[str]:
    """The best K, what it costs, and what the figures do not hold."""
    said = [_best(sweep)]
    if sweep.cost_ratio is not None:
        said += [_cost(sweep, k) for k in ([sweep.best_k] if sweep.best_k is not None else sweep.undecided) if k > 0]
    apart = [f"K = {row.k} {_apart(row)}" for row in sweep.rows if row.prediction_agrees is False]
    return [*said, *_disagreement(apart), *_disturbed(sweep.disturbance), *([sweep.note] if sweep.note else [])]


def break_it_conclusions(result: BreakIt) -> list[str]:
    """What each drafter does and why; on a line of its own, indented, where its tokens were accepted."""
    said = []
    for row in result.rows:
        if row.name != "baseline":
            said += [f"{row.name}: {_verdict(row)}", *(f"  {line}" for line in _where_accepted(row))]
    apart = [f"{row.name} {_apart(row)}" for row in result.rows if row.prediction_agrees is False]
    return [*said, *_disagreement(apart), *_disturbed(result.disturbance), *([result.note] if result.note else [])]


def in_steps(cost_ratio: float) -> str:
    """The cost of a draft step in target steps; one that is next to nothing, as a lookup's, by its size: 6e-4."""
    if cost_ratio == 0 or cost_ratio >= 0.01:
        return f"{cost_ratio:.2f}"
    digit, exponent = f"{cost_ratio:.0e}".split("e")
    return f"{digit}e{int(exponent)}"


# ---- The sweep ----


def _best(sweep: Sweep) -> str:
    if len(sweep.rows) == 1:
        (row,) = sweep.rows
        return f"Only {f'K = {row.k}' if row.k else 'plain decoding'} was measured."
    if sweep.best_k is None:
        between = " and ".join(f"K = {k}" for k in sweep.undecided)
        return (
            f"Undecided between {between} after {_repeats(sweep.num_repeats)} of each: more prompts or more time would "
            "tell (sweep.num_prompts, sweep.max_seconds)."
        )
    row = next(row for row in sweep.rows if row.k == sweep.best_k)
    near = f"within {sweep.margin or 0:.0%} of the fastest beyond doubt"
    if row.k == 0:
        return f"Best K = 0: do not speculate with this pair. Plain decoding is {near}."
    if row.speedup is None:
        return f"Best K = {row.k}, {near}; plain decoding (K = 0) was not measured beside it."
    measured = f"{_times(row.speedup, row.speedup_interval)} in {_repeats(row.num_repeats, 'fresh ')}"
    text = f"Best K = {row.k}, {near}: {measured}."
    if row.speedup_interval and row.speedup_interval[0] <= 1:
        text += " That it beats plain decoding is not certain."
    return text


def _repeats(count: int, kind: str = "") -> str:
    return f"{count} {kind}repeat{'s' if count > 1 else ''}"


def _cost(sweep: Sweep, k: int) -> str:
    """What a round of K brings and costs, beside the longest one."""
    rows = {row.k: row for row in sweep.rows}
    assert sweep.cost_ratio is not None

    def cost(k: int) -> float:
        return k * (sweep.cost_ratio or 0) + sweep.verify_cost[k + 1] + sweep.overhead[k]

    text = (
        f"K = {k} emits {rows[k].mean_acceptance_length:.2f} tokens a target pass at the cost of {cost(k):.2f} plain "
        f"steps: {k} draft step{'s' if k > 1 else ''} of {in_steps(sweep.cost_ratio)}, verifying "
        f"{sweep.verify_cost[k + 1]:.2f}, the rest {sweep.overhead[k]:.2f}"
    )
    longest = sweep.rows[-1]
    if longest.k > k:
        text += f"; K = {longest.k} emits {longest.mean_acceptance_length:.2f} for {cost(longest.k):.2f}"
    return text + "."


# ---- The comparison ----


def _verdict(row: BreakRow) -> str:
    measured = _times(row.speedup, row.speedup_interval)
    if row.pays is None:
        unsure = "not told from plain decoding" if row.speedup_interval else "no interval from so few prompts"
        text = f"{unsure}, {measured}"
    else:
        text = f"{'pays' if row.pays else 'does not pay'}, {measured}"
    if row.expected_acceptance is None:
        return f"{text}; it drafted nothing" if row.acceptance_rate is None else text
    needed = "no alpha would pay" if row.break_even_alpha is None else f"break-even {row.break_even_alpha:.2f}"
    cause = ""
    if row.speedup < 1 and row.cause == "agreement":
        cause = "low agreement, "
    elif row.speedup < 1 and row.cause == "draft cost":
        cause = f"costly draft, {in_steps(row.cost_ratio or 0)} target steps a token, "
    text += f"; {cause}alpha {row.expected_acceptance:.2f}, {needed}"
    if row.predicted_speedup is not None:
        text += f"; predicted {_times(row.predicted_speedup, row.predicted_interval)}"
    return text


def _where_accepted(row: BreakRow) -> list[str]:
    """One line on where a drafter's tokens were accepted; none where nothing was judged."""
    if not row.conditional_acceptance or not row.acceptance_by_entropy:
        return []
    text = "accepted by position " + ", ".join(f"{share:.0%}" for share in row.conditional_acceptance)
    surest, least_sure = row.acceptance_by_entropy[0], row.acceptance_by_entropy[-1]
    if surest.acceptance is not None and least_sure.acceptance is not None and surest is not least_sure:
        text += (
            f"; {surest.acceptance:.0%} of {surest.num_judged} where the target is surest (entropy below "
            f"{surest.high:.1f} nats), {least_sure.acceptance:.0%} of {least_sure.num_judged} where it is least sure "
            f"(from {least_sure.low:.1f})"
        )
    return [text]


# ---- Both ----


def _apart(row: SweepRow | BreakRow) -> str:
    assert row.predicted_speedup is not None and row.speedup is not None
    predicted = _times(row.predicted_speedup, row.predicted_interval)
    return f"(predicted {predicted}, measured {_times(row.speedup, row.speedup_interval)})"


def _disagreement(apart: list[str]) -> list[str]:
    if not apart:
        return []
    return [f"Prediction and measurement are further apart than their intervals explain: {', '.join(apart)}."]


def _disturbed(found: Disturbance) -> list[str]:
    said = []
    if found.num_measured_again:
        said.append(f"{found.num_measured_again} blocks of runs were disturbed by other load and measured again")
    if found.num_disturbed:
        said.append(
            f"{found.num_disturbed} of the {found.num_blocks} that count ran beside other load: a quiet machine would "
            "give other figures"
        )
    return [f"{'; '.join(said)}."] if said else []


def _times(value: float, interval: Interval | None) -> str:
    return f"{value:.2f}x" + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else "")
