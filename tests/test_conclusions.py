"""Sentences follow from figures: each verdict from the measured interval, never from theory or from noise."""

from typing import Any

from specctl.experiments.break_it import BreakIt, BreakRow, EntropyBand
from specctl.experiments.measure import Disturbance
from specctl.experiments.sweep_k import Sweep, SweepRow
from specctl.report.conclusions import break_it_conclusions, in_steps, sweep_conclusions


def row(k: int, speedup: float, **fields: Any) -> SweepRow:
    given = {"predicted_speedup": 1.0, "acceptance_rate": None, "mean_acceptance_length": 1 + k / 2, "num_repeats": 3}
    return SweepRow(k=k, tokens_per_second=100 * speedup, spread=0.0, speedup=speedup, **given | fields)


def sweep(rows: list[SweepRow], **fields: Any) -> Sweep:
    given: dict[str, Any] = {"best_k": None, "cost_ratio": 0.1, "conditional_acceptance": []}
    given |= {"verify_cost": {1: 1.0, 3: 1.2, 5: 1.4}, "overhead": {2: 0.05, 4: 0.06}, "num_repeats": 12}
    return Sweep(drafter="distilled", temperature=1.0, rows=rows, **given | fields)


ROWS = [row(0, 1.0), row(2, 1.5, speedup_interval=(1.4, 1.6), is_fresh=True), row(4, 1.45)]


def test_the_best_k_its_fresh_speedup_and_what_it_costs() -> None:
    best, cost = sweep_conclusions(sweep(ROWS, best_k=2, margin=0.03))
    assert best == "Best K = 2, within 3% of the fastest beyond doubt: 1.50x (1.40-1.60) in 3 fresh repeats."
    assert cost == (
        "K = 2 emits 2.00 tokens a target pass at the cost of 1.45 plain steps: 2 draft steps of 0.10, verifying 1.20, "
        "the rest 0.05; K = 4 emits 3.00 for 1.86."
    )
    lookup = sweep_conclusions(sweep(ROWS, best_k=2, margin=0.03, cost_ratio=0.00061))[1]
    assert "2 draft steps of 6e-4, verifying" in lookup  # no drafter is free
    longest = sweep_conclusions(sweep(ROWS, best_k=4, margin=0.05))
    assert longest[0].startswith("Best K = 4, within 5%") and longest[1].endswith("the rest 0.06.")


def test_what_a_draft_step_costs_is_never_rounded_to_nothing() -> None:
    shown = [in_steps(cost) for cost in (1.5, 0.036, 0.01, 0.0099, 0.0061, 0.00061, 0.0)]
    assert shown == ["1.50", "0.04", "0.01", "1e-2", "6e-3", "6e-4", "0.00"]


def test_a_best_k_that_may_not_beat_plain_decoding_says_so() -> None:
    rows = [row(0, 1.0), row(2, 1.02, speedup_interval=(0.97, 1.08))]
    assert sweep_conclusions(sweep(rows, best_k=2, margin=0.03))[0].endswith(
        "1.02x (0.97-1.08) in 3 fresh repeats. That it beats plain decoding is not certain."
    )


def test_undecided_names_two_and_says_what_would_tell() -> None:
    undecided, *costs = sweep_conclusions(sweep(ROWS, undecided=(2, 4)))
    assert undecided.startswith("Undecided between K = 2 and K = 4 after 12 repeats of each: ")
    assert "sweep.num_prompts" in undecided and "sweep.max_seconds" in undecided
    assert [text[:5] for text in costs] == ["K = 2", "K = 4"]


def test_when_not_to_speculate_and_when_nothing_was_compared() -> None:
    assert sweep_conclusions(sweep(ROWS, best_k=0, margin=0.03)) == [
        "Best K = 0: do not speculate with this pair. Plain decoding is within 3% of the fastest beyond doubt."
    ]
    alone = sweep([row(0, 1.0)], best_k=0, cost_ratio=None)
    assert sweep_conclusions(alone) == ["Only plain decoding was measured."]
    assert sweep_conclusions(sweep(ROWS[1:2], best_k=2))[0] == "Only K = 2 was measured."
    without = [row(2, 1.0, speedup_interval=None), row(4, 1.0)]
    without = [SweepRow(**{**fields_of(one), "speedup": None}) for one in without]
    assert "plain decoding (K = 0) was not measured" in sweep_conclusions(sweep(without, best_k=2, margin=0.03))[0]


def fields_of(one: SweepRow) -> dict[str, Any]:
    return {name: getattr(one, name) for name in SweepRow.__dataclass_fields__}


def test_a_prediction_that_does_not_hold_is_said_with_both_figures() -> None:
    apart = row(
        4,
        1.78,
        predicted_speedup=2.2,
        predicted_interval=(2.1, 2.3),
        speedup_interval=(1.69, 1.89),
        prediction_agrees=False,
    )
    said = sweep_conclusions(sweep([ROWS[0], ROWS[1], apart], best_k=2, margin=0.03))
    assert said[-1] == (
        "Prediction and measurement are further apart than their intervals explain: K = 4 (predicted 2.20x "
        "(2.10-2.30), measured 1.78x (1.69-1.89))."
    )


def test_other_load_is_said() -> None:
    again = sweep(ROWS, best_k=2, margin=0.03, disturbance=Disturbance(num_blocks=36, num_measured_again=5))
    assert sweep_conclusions(again)[-1] == "5 blocks of runs were disturbed by other load and measured again."
    kept = Disturbance(num_blocks=36, num_measured_again=9, num_disturbed=12)
    said = sweep_conclusions(sweep(ROWS, best_k=2, margin=0.03, disturbance=kept, note="A note."))
    assert said[-2].endswith(
        "; 12 of the 36 that count ran beside other load: a quiet machine would give other figures."
    )
    assert said[-1] == "A note."


def broken(name: str, speedup: float, **fields: Any) -> BreakRow:
    return BreakRow(name=name, tokens_per_second=100.0, spread=0.0, speedup=speedup, **fields)


def verdicts(*rows: BreakRow) -> list[str]:
    return break_it_conclusions(BreakIt(k=4, temperature=1.0, rows=[broken("baseline", 1.0), *rows]))


def test_pays_is_what_was_measured_whatever_theory_says() -> None:
    common: dict[str, Any] = {"acceptance_rate": 0.3, "expected_acceptance": 0.6, "break_even_alpha": 0.5}
    good = broken("good", 1.7, speedup_interval=(1.5, 1.9), pays=True, predicted_speedup=1.8, **common)
    bad = broken(
        "bad", 0.75, speedup_interval=(0.7, 0.8), pays=False, cause="agreement", predicted_speedup=1.03, **common
    )
    unsure = broken("unsure", 1.02, speedup_interval=(0.9, 1.1), cause="agreement", **common)
    few = broken("few", 1.3, **common)
    assert verdicts(good, bad, unsure, few) == [
        "good: pays, 1.70x (1.50-1.90); alpha 0.60, break-even 0.50; predicted 1.80x",
        "bad: does not pay, 0.75x (0.70-0.80); low agreement, alpha 0.60, break-even 0.50; predicted 1.03x",
        "unsure: not told from plain decoding, 1.02x (0.90-1.10); alpha 0.60, break-even 0.50",
        "few: no interval from so few prompts, 1.30x; alpha 0.60, break-even 0.50",
    ]


def test_causes_in_words() -> None:
    costly = broken(
        "big",
        0.5,
        speedup_interval=(0.4, 0.6),
        pays=False,
        cause="draft cost",
        cost_ratio=0.9,
        acceptance_rate=1.0,
        expected_acceptance=1.0,
    )
    silent = broken("silent", 1.0, speedup_interval=(0.98, 1.02))
    assert verdicts(costly, silent) == [
        "big: does not pay, 0.50x (0.40-0.60); costly draft, 0.90 target steps a token, alpha 1.00, no alpha would pay",
        "silent: not told from plain decoding, 1.00x (0.98-1.02); it drafted nothing",
    ]


def test_where_tokens_were_accepted() -> None:
    bands = [
        EntropyBand(low=0.0, high=1.5, num_judged=2, acceptance=1.0),
        EntropyBand(low=4.2, high=None, num_judged=2, acceptance=0.0),
    ]
    found = verdicts(broken("x", 1.0, conditional_acceptance=[0.75, 0.5], acceptance_by_entropy=bands))
    assert found[1] == (
        "  accepted by position 75%, 50%; 100% of 2 where the target is surest (entropy below 1.5 nats), "
        "0% of 2 where it is least sure (from 4.2)"
    )
    greedy = verdicts(broken("x", 1.0, conditional_acceptance=[1.0], acceptance_by_entropy=bands[:1]))
    assert greedy[1] == "  accepted by position 100%"
