"""What theory predicts, with numbers: every round at its own cost, and an interval that holds as often as it says."""

import math
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from tiny_run import Tiny
from torch import Tensor

from specctl.acceptance import Chance, Proposal, Verdict, token_rule
from specctl.experiments import intervals, prediction, timing
from specctl.experiments.agreement import Passes, agreement_on
from specctl.experiments.prediction import Prediction, agrees, predict
from specctl.experiments.timing import DRAFT, EMPTY, PLAIN, Costs, CostTimer, Part, costs_of, measure_costs
from specctl.models.session import Forward


def costs(rounds: dict[int, list[float]], plain: list[float]) -> Costs:
    return Costs(
        target_step_seconds=1.0,
        cost_ratio=0.1,
        verify_cost={1: 1.0},
        overhead={},
        plain_seconds=np.array(plain),
        round_seconds={size: np.array(seconds) for size, seconds in rounds.items()},
    )


def passes(tokens: list[float], **rounds: list[float]) -> Passes:
    """rounds: `d4=[..]` is how many rounds drafted 4 tokens, prompt by prompt."""
    found = {int(size[1:]): np.array(counts) for size, counts in rounds.items()}
    return Passes(tokens=np.array(tokens), rounds=found, requests=np.ones(len(tokens)))


EVEN = costs({0: [1.0] * 4, 1: [2.0] * 4, 4: [3.5] * 4}, [1.0] * 4)


def test_every_round_counts_at_its_own_size() -> None:
    """40 tokens: 10 rounds of 4 drafts at 3.5, one of 2 at 2.5 on the line from 2.0 to 3.5, and 5 that are plain."""
    found = predict(passes([40.0], d4=[10.0], d2=[1.0], d0=[5.0]), EVEN, 0)
    assert found.speedup == pytest.approx(40 / (10 * 3.5 + 2.5 + 5))
    assert found.interval is None  # of one prompt


def test_a_short_last_round_is_not_counted_as_a_long_one() -> None:
    """Budgets cut the last round: were it taken for a full one, the prediction would be lower."""
    cut = predict(passes([12.0], d4=[2.0], d1=[1.0]), EVEN, 0).speedup
    assert cut == pytest.approx(12 / (2 * 3.5 + 2.0)) and cut > 12 / (3 * 3.5)


def test_acceptance_that_was_measured_decides_not_the_most_that_k_allows() -> None:
    few, many = (predict(passes([tokens], d4=[10.0]), EVEN, 0).speedup for tokens in (20.0, 50.0))
    assert (few, many) == (pytest.approx(20 / 35), pytest.approx(50 / 35))


def test_the_interval_is_over_prompts_and_over_trials() -> None:
    same = passes([30.0] * 12, d4=[10.0] * 12)
    assert predict(same, EVEN, 0).interval == pytest.approx((30 / 35, 30 / 35))
    unlike = passes([20.0, 40.0] * 6, d4=[10.0] * 12)
    low, high = predict(unlike, EVEN, 0).interval or (0, 0)
    assert 20 / 35 < low < 30 / 35 < high < 40 / 35
    assert predict(passes([20.0, 40.0] * 2, d4=[10.0] * 4), EVEN, 0).interval is None  # fewer than 6 prompts
    shaky = costs({0: [1.0] * 5, 4: [3.0, 3.2, 3.5, 3.8, 4.0]}, [1.0] * 5)
    low, high = predict(same, shaky, 0).interval or (0, 0)
    assert 30 / 40 <= low < 30 / 35 < high <= 30 / 30
    assert predict(unlike, shaky, 0) == predict(unlike, shaky, 0) != predict(unlike, shaky, 1)


def test_resamples_are_as_many_as_the_docs_say() -> None:
    """With 100 of them an interval would move by its own noise from seed to seed."""
    assert intervals.RESAMPLES == prediction.RESAMPLES == 2000 == len(intervals.resamples(6, 0))
    unlike = passes([20.0, 30.0, 40.0] * 4, d4=[10.0] * 12)
    lows = [(predict(unlike, EVEN, seed).interval or (0, 0))[0] for seed in range(20)]
    assert np.std(lows) < 0.01


def test_a_prediction_and_a_measurement_agree_about_as_often_as_they_say() -> None:
    """Both from 12 prompts of one kind: at least 90 of 100 pairs agree, and a speedup that is 30 % off never does.

    At 95 % fewer than 90 agree by chance once in 60 sets of 100.
    """
    generator, agreed, fooled = np.random.default_rng(0), 0, 0
    plain = intervals.Timings(tokens=np.full(12, 64.0), seconds=np.full(12, 64.0), rounds=np.full(12, 64.0))
    for seed in range(100):
        tokens, rounds = np.full(12, 64.0), 20 * np.exp(generator.normal(0, 0.15, (2, 12)))
        found = predict(Passes(tokens=tokens, rounds={4: rounds[0]}, requests=np.ones(12)), EVEN, seed)
        fast = intervals.Timings(tokens=tokens, seconds=3.5 * rounds[1], rounds=rounds[1])
        interval, measured = intervals.speedup_interval(fast, plain, seed), 64 / (3.5 * rounds[1].mean())
        assert interval is not None
        agreed += agrees(found, measured, interval) is True
        fooled += agrees(found, 1.5 * measured, (1.5 * interval[0], 1.5 * interval[1])) is True
    assert agreed >= 90 and fooled == 0


def test_agreement_takes_each_interval_on_the_side_of_the_other_figure() -> None:
    """By hand: log(2.0 / 1.8) = 0.105; down from 2.0 to 1.95 is 0.025, up from 1.8 to 1.9 is 0.054."""
    far = Prediction(speedup=2.0, interval=(1.95, 9.0))
    assert agrees(far, 1.8, (0.1, 1.9)) is False
    assert math.hypot(math.log(2.0 / 1.95), math.log(1.9 / 1.8)) < math.log(2.0 / 1.8)
    assert agrees(far, 1.8, (0.1, 2.01)) is True
    assert agrees(Prediction(speedup=1.8, interval=(1.0, 2.01)), 2.0, (1.95, 9.0)) is True
    assert agrees(Prediction(speedup=1.8, interval=None), 2.0, (1.0, 3.0)) is None
    assert agrees(far, 2.0, None) is None
    assert agrees(far, 2.0, (1.9, 2.1)) is True


# What a round costs


def times(**changed: list[float]) -> dict[Part, list[float]]:
    found: dict[Part, list[float]] = {PLAIN: [2.0, 2.0, 4.0], EMPTY: [2.1, 2.1, 4.2], DRAFT: [0.2, 0.2, 0.4]}
    found |= {("rows", 1): [1.6] * 3, ("rows", 2): [2.0] * 3, ("rows", 3): [1.8] * 3}
    found |= {("round", 1): [3.0, 3.0, 6.0], ("round", 2): [3.6, 36.0, 7.2]}
    return found | changed  # type: ignore[operator]


def test_costs_by_hand() -> None:
    """In plain steps of 2: a draft step 0.1; 2 rows 2.0 / 1.6; 3 rows no less than 2; the rest is what is left.

    In the last trial the machine was half as fast, which changes no ratio; in the second one round was disturbed.
    """
    found = costs_of(times(), [1, 2])
    assert found.target_step_seconds == 2.0 and found.cost_ratio == pytest.approx(0.1)
    assert found.verify_cost == pytest.approx({1: 1.0, 2: 1.25, 3: 1.25})  # case K39: never below fewer rows
    assert found.overhead == pytest.approx({1: 1.5 - 0.1 - 1.25, 2: 1.8 - 0.2 - 1.25})
    assert [found.round_cost(size) for size in (0, 1, 2)] == pytest.approx([1.05, 1.5, 1.8])
    assert found.num_trials == 3
    picks = np.array([[0, 0, 1], [2, 2, 2]])
    assert found.round_cost(2, picks) == pytest.approx([1.8, 1.8])
    assert found.round_cost(2, np.array([[1, 1, 0]])) == pytest.approx([18.0])


def test_more_rows_are_never_cheaper_than_one() -> None:
    quick: Any = {("rows", 2): [1.5] * 3, ("rows", 3): [1.4] * 3}
    assert costs_of(times() | quick, [1, 2]).verify_cost == {1: 1.0, 2: 1.0, 3: 1.0}


BY_STEPS = "runtime.kernel=false"  # each step of a draft is a pass of its own: a copy of the target costs as much


class Clock:
    """Time that passes where it is told to: 1 with each target pass, 0.25 with each draft pass, 3 with each verdict."""

    def __init__(self, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, first_pass: float = 1.0) -> None:
        self.now, self.pair = 0.0, tiny.pair(BY_STEPS)
        sessions = type(self.pair.target.session())
        extend, clock = sessions.extend, self
        seen: WeakSet[Any] = WeakSet()

        def timed_extend(session: Any, ids: Tensor, num_logits: int | None = None) -> Forward:
            is_target = session._decoder is clock.pair.target
            slow = is_target and ids.shape[1] < 8 and session not in seen
            if is_target and ids.shape[1] < 8:
                seen.add(session)
            clock.now += (first_pass if slow else 1.0) if is_target else 0.25
            return extend(session, ids, num_logits)

        def timed_rule(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
            clock.now += 3.0
            return token_rule(p, proposal, chance)

        monkeypatch.setattr(sessions, "extend", timed_extend)
        monkeypatch.setattr(self.pair, "rule", timed_rule)
        for module in ("specctl.experiments.timing", "specctl.decoding"):
            monkeypatch.setattr(f"{module}.perf_counter", lambda: clock.now)


def test_overhead_is_what_the_parts_of_a_round_do_not_explain(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_costs(Clock(tiny, monkeypatch).pair, "distilled", [1, 3])
    assert (found.target_step_seconds, found.cost_ratio, found.verify_cost) == (1.0, 0.25, {1: 1.0, 2: 1.0, 4: 1.0})
    assert found.overhead == {1: 3.0, 3: 3.0}
    assert [found.round_cost(size) for size in (0, 1, 2, 3)] == [1.0, 4.25, 4.5, 4.75]


def test_a_slow_opening_counts_once_a_request_on_both_sides() -> None:
    """Two requests: 2 plain steps more for plain decoding's, 3 more for those that draft."""
    opened = replace(EVEN, plain_opening=2.0, round_opening={4: 3.0})
    found = predict(replace(passes([40.0], d4=[10.0]), requests=np.array([2.0])), opened, 0)
    assert found.speedup == pytest.approx((40 + 2 * 2) / (10 * 3.5 + 2 * 3))


def test_the_first_round_of_a_request_is_left_out(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass after a prompt takes 50 times as long here: no cost knows of it."""
    found = measure_costs(Clock(tiny, monkeypatch, first_pass=50.0).pair, "distilled", [1, 3])
    assert found.target_step_seconds == 1.0
    assert [found.round_cost(size) for size in (0, 1, 3)] == [1.0, 4.25, 4.75]
    assert (found.plain_opening, found.round_opening) == (49.0, {0: 49.0, 1: 49.0, 3: 49.0})


def test_a_trial_has_as_many_rounds_as_the_context_holds(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds right after a prompt are no plain step that a request is made of."""
    assert timing._ROUNDS >= 32
    pair, counts = tiny.pair(), list[int]()
    plain = pair.plain
    monkeypatch.setattr(
        pair,
        "plain",
        lambda prompt, **options: counts.append(options["stop"].max_new_tokens) or plain(prompt, **options),
    )
    CostTimer(pair, "distilled", [3])
    # A context of 64 tokens; the first four rounds do not count. Plain steps are timed twice.
    assert counts == [4 + (64 - 3) // 2 - 2 - 4] * 2


def test_sizes_that_were_not_timed_lie_between_those_that_were() -> None:
    assert [EVEN.round_cost(size) for size in (0, 1, 2, 3, 4, 9)] == pytest.approx([1.0, 2.0, 2.5, 3.0, 3.5, 3.5])


def test_a_prediction_from_the_public_loop_by_hand(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted rounds times the costs of the clock: nothing else goes in."""
    pair = Clock(tiny, monkeypatch).pair
    found = agreement_on(pair, "distilled", 3, pair.prompts(3), repeats=4)
    assert found.passes.tokens.tolist() == [48.0] * 3  # four texts of 12 tokens each
    sizes = {size: counts.sum() for size, counts in found.passes.rounds.items()}
    assert found.stats.num_rounds == sum(sizes.values()) and set(sizes) <= {0, 1, 2, 3} and sizes[3] > 0
    assert set(sizes) & {0, 1, 2}, "no budget cut a last round short"
    spent = sum(count * (1.0 if size == 0 else 4.0 + size / 4) for size, count in sizes.items())
    assert predict(found.passes, measure_costs(pair, "distilled", [1, 3]), 0).speedup == pytest.approx(144 / spent)
