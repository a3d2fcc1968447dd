"""What the experiments conclude follows from what they measured, and each measurement stands alone."""

import random
from statistics import NormalDist
from typing import Any

import pytest
import torch
from fakes import Clock
from safetensors.torch import load_file, save_file
from tiny_run import Tiny
from torch import Tensor

from specctl.acceptance import Chance, Proposal, Verdict, token_rule
from specctl.events import Round
from specctl.experiments import intervals, measure
from specctl.experiments.break_it import _cause, break_it
from specctl.experiments.generate import generate
from specctl.experiments.intervals import Timings, best_k, by_category, by_prompt, length_interval, speedup_interval
from specctl.experiments.measure import Variant, acceptance_on, measure_speeds
from specctl.experiments.pair import Pair
from specctl.experiments.sweep_k import SweepRow, explain, sweep_k
from specctl.experiments.timing import Costs, measure_costs
from specctl.experiments.workload import EncodedPrompt, workload
from specctl.stats import Stats, collect


def row(k: int, speed: float, spread: float = 0.0, length: float = 1.0) -> SweepRow:
    return SweepRow(
        k=k,
        tokens_per_second=speed,
        spread=spread,
        speedup=speed / 100,
        predicted_speedup=1.0,
        acceptance_rate=None,
        mean_acceptance_length=length,
    )


COSTS = Costs(
    target_step_seconds=0.01,
    cost_ratio=0.1,
    verify_cost={1: 1.0, 3: 1.2, 5: 1.4},
    overhead={2: 0.05, 4: 0.06},
)


# Which K is best, and how sure that is. A "run" here is made up: 100 tokens at a true speed, with noise.


def runs(speeds: list[list[float]], rounds: int = 50) -> list[list[Stats]]:
    """Runs of 100 tokens for each prompt and repeat, given their speeds."""
    return [
        [Stats(num_new_tokens=100, num_rounds=rounds, seconds=100 / speed) for speed in repeats] for repeats in speeds
    ]


def timings(speeds: list[list[float]]) -> Timings:
    return measure._speed(runs(speeds)).timings


def noisy(
    speed: float, noise: float, draws: random.Random, num_prompts: int = 4, repeats: int = 3
) -> list[list[float]]:
    """Prompts of unlike difficulty, the same for every K, and noise on each run."""
    return [
        [speed * (1 + index / 2) * (1 + draws.gauss(0, noise)) for _ in range(repeats)] for index in range(num_prompts)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_difference_of_10_percent_is_found_in_noise_of_3(seed: int) -> None:
    draws = random.Random(seed)
    speeds = {k: timings(noisy(speed, 0.03, draws)) for k, speed in {0: 100, 2: 118, 4: 130, 6: 117}.items()}
    assert best_k(speeds, seed) == 4


@pytest.mark.parametrize("seed", range(5))
def test_of_equal_speeds_the_smallest_k_is_best(seed: int) -> None:
    """In noise of 3 %, prompts that shift up and down for each K alike."""
    speeds = {k: [[130.0 + sign] * 3 for sign in ((-1) ** (i + k) for i in range(8))] for k in (2, 4, 6)}
    assert best_k({k: timings(found) for k, found in {**speeds, 0: [[100.0] * 3] * 8}.items()}, seed) == 2


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_one_noisy_repeat_changes_nothing(factor: float) -> None:
    draws = random.Random(0)
    speeds = {k: noisy(speed, 0.02, draws, num_prompts=8) for k, speed in {0: 100, 1: 115, 4: 140, 7: 141}.items()}
    before = {k: measure._speed(runs(found)) for k, found in speeds.items()}
    best = best_k({k: found.timings for k, found in before.items()}, 0)
    assert best == 4
    for k in speeds:
        disturbed = {other: [list(repeats) for repeats in found] for other, found in speeds.items()}
        for repeats in disturbed[k]:
            repeats[1] *= factor  # the machine was busy, or idle, during one whole repeat of this K
        after = {other: measure._speed(runs(found)) for other, found in disturbed.items()}
        assert best_k({other: found.timings for other, found in after.items()}, 0) == best
        assert after[k].tokens_per_second == pytest.approx(before[k].tokens_per_second, rel=0.03)
        assert after[k].spread > 5 * before[k].spread  # the spread tells of it


def test_best_k_of_one_prompt_is_the_fastest_and_of_one_k_itself() -> None:
    assert best_k({0: timings([[100.0]]), 2: timings([[101.0]]), 4: timings([[100.5]])}, 0) == 2
    assert best_k({3: timings([[100.0], [90.0]])}, 0) == 3


def test_intervals_are_paired_seeded_and_of_totals() -> None:
    plain = timings([[100.0], [50.0], [10.0]])
    twice = timings([[200.0], [100.0], [20.0]])
    assert speedup_interval(twice, plain, 0) == pytest.approx((2.0, 2.0))  # unlike prompts, but paired
    mixed = timings([[100.0], [100.0], [30.0]])
    low, high = speedup_interval(mixed, plain, 0) or (0, 0)
    assert 1 <= low < mixed.tokens_per_second / plain.tokens_per_second < high <= 3
    assert speedup_interval(mixed, plain, 0) == (low, high)
    assert speedup_interval(plain, plain, 0) is speedup_interval(plain, None, 0) is None
    assert speedup_interval(timings([[2.0]]), timings([[1.0]]), 0) is length_interval(timings([[2.0]]), 0) is None


def test_an_interval_covers_as_often_as_it_says() -> None:
    """Seconds of 12 prompts around 1, plain ones 2: about 95 % of 300 intervals hold a speedup of 2.

    Fewer than 268 or more than 298 happen by chance less than once in 10,000 draws.
    """
    draws, plain, covered = random.Random(0), timings([[50.0]] * 12), 0
    for seed in range(300):
        speeds = [[100 / draws.gauss(1, 0.2)] for _ in range(12)]
        low, high = speedup_interval(timings(speeds), plain, seed) or (0, 0)
        covered += low <= 2 <= high
    assert 268 <= covered <= 298


def test_few_prompts_give_wider_intervals() -> None:
    """The quantiles behind it are those of Student's t: 3.182 for 4 prompts, 2.201 for 12, 1.96 for many."""
    for num_prompts, t in ((4, 3.182), (12, 2.201), (10_000, 1.96)):
        expected = NormalDist().cdf(-((num_prompts / (num_prompts - 1)) ** 0.5) * t)
        assert intervals._expanded(num_prompts) == pytest.approx(expected, rel=0.15)
    plain, fast = timings([[1.0], [1.0]]), timings([[1.5], [3.0]])
    assert speedup_interval(fast, plain, 0) == pytest.approx((1.5, 3.0))


def test_figures_by_prompt_and_by_category() -> None:
    categories = ["code", "prose", "code", None]
    prompts = [EncodedPrompt(id=str(i), category=category, token_ids=[1]) for i, category in enumerate(categories)]
    plain, fast = timings([[100.0], [50.0], [50.0], [10.0]]), timings([[200.0], [50.0], [150.0], [30.0]])
    found = by_prompt(prompts, fast, plain)
    assert [(one.id, one.category) for one in found] == [("0", "code"), ("1", "prose"), ("2", "code"), ("3", None)]
    assert [one.speedup for one in found] == pytest.approx([2, 1, 3, 3])
    assert [one.tokens_per_second for one in found] == pytest.approx([200, 50, 150, 30])
    assert {one.mean_acceptance_length for one in found} == {2.0}
    code, prose, rest = by_category(prompts, fast, plain, 0)
    assert [(one.category, one.num_prompts) for one in (code, prose, rest)] == [("code", 2), ("prose", 1), (None, 1)]
    assert code.tokens_per_second == pytest.approx(200 / (1 / 2 + 100 / 150))
    assert code.speedup == pytest.approx((1 + 2) / (1 / 2 + 2 / 3))
    assert code.speedup_interval == pytest.approx((2, 3)) and prose.speedup_interval is None
    assert by_category(prompts[3:], fast.only([3]), plain.only([3]), 0) == []
    assert by_category(prompts, fast, None, 0)[0].speedup is None


def test_reason_gives_the_sum_and_what_the_longest_k_costs() -> None:
    rows = [row(0, 100), row(2, 150, length=2.4), row(4, 140, length=2.8)]
    text = explain(rows[1], rows, COSTS)
    assert text == (
        "K = 2 emits 2.40 tokens a target pass for the price of 1.45 target steps (2 draft steps of 0.10, "
        "verifying 1.20, the rest 0.05); K = 4 emits 2.80 for 1.86."
    )
    assert "K = 4 emits 2.80 tokens a target pass for the price of 1.86" in explain(rows[2], rows, COSTS)
    assert ";" not in explain(rows[2], rows, COSTS)


def test_reason_says_when_not_to_speculate() -> None:
    rows = [row(0, 100), row(2, 90)]
    assert explain(rows[0], rows, COSTS).startswith("Do not speculate with this pair: a draft step costs 0.10 target")
    assert explain(rows[0], rows[:1], None) == "Only plain decoding was measured."


def test_sweep_rows(tiny: Tiny) -> None:
    result = sweep_k(tiny.pair(), "distilled")
    assert [row.k for row in result.rows] == [0, 1, 3]
    plain = result.rows[0]
    assert (plain.speedup, plain.predicted_speedup) == (1.0, 1.0)
    assert plain.acceptance_rate is None and plain.mean_acceptance_length == 1.0
    for found in result.rows[1:]:
        assert found.speedup == pytest.approx(found.tokens_per_second / plain.tokens_per_second)
        assert found.acceptance_rate is not None and 0 < found.acceptance_rate <= 1
        assert found.mean_acceptance_length is not None and 1 < found.mean_acceptance_length <= found.k + 1
    assert sorted(result.verify_cost) == [1, 2, 4] and result.verify_cost[1] == 1.0
    assert len(result.conditional_acceptance) == 3
    assert result.best_k in (0, 1, 3)
    assert [found.id for found in result.rows[1].by_prompt] == ["validation-0", "validation-1"]
    assert result.rows[1].by_category == [] and result.note is None


def test_sweep_of_k_0_alone_and_without_it(tiny: Tiny) -> None:
    alone = sweep_k(tiny.pair("sweep.k=[0]"), "distilled")
    assert (alone.best_k, alone.cost_ratio, alone.conditional_acceptance) == (0, None, [])
    without = sweep_k(tiny.pair("sweep.k=[2, 2, 1]"), "distilled")
    assert [row.k for row in without.rows] == [1, 2]
    assert all(row.speedup is None for row in without.rows)


def test_prediction_takes_other_prompts_and_no_measured_time(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny.pair()
    seen: dict[str, list[tuple[int, ...]]] = {"agreement": [], "speed": []}
    original = pair.events

    def watching(prompt: list[int], **options: Any) -> Any:
        if prompt[:3] != [0, 1, 2]:  # the costs are timed on a made-up one that counts up
            seen["agreement" if "rule" in options else "speed"].append(tuple(prompt))
        return original(prompt, **options)

    monkeypatch.setattr(pair, "events", watching)
    sweep_k(pair, "distilled")
    assert len(set(seen["agreement"])) == 2 and len(set(seen["speed"])) == 2
    assert not set(seen["agreement"]) & set(seen["speed"])


def test_offset_prompts_are_the_later_ones(tiny: Tiny) -> None:
    pair = tiny.pair()
    assert pair.prompts(2, offset=2) == pair.prompts(4)[2:]
    assert len({tuple(prompt) for prompt in pair.prompts(4)}) == 4
    assert {len(prompt) for prompt in pair.prompts(4)} == {8}
    assert tiny.pair("seed=1").prompts(4) != pair.prompts(4)


def test_a_prompt_gives_the_same_tokens_whatever_ran_before(tiny: Tiny) -> None:
    pair = tiny.pair()
    first, second = pair.prompts(2)

    def tokens(prompt: list[int], request: int = 0) -> list[int]:
        return collect(pair.events(prompt, drafter="distilled", k=3, request=request))[0]

    alone = tokens(first)
    tokens(second)
    assert tokens(first) == alone
    assert tokens(first, request=1) != alone


def test_greedy_text_does_not_depend_on_k(tiny: Tiny) -> None:
    pair = tiny.pair("decoding.temperature=0")
    (prompt,) = pair.prompts(1)
    texts = [collect(pair.events(prompt, drafter="mismatched", k=k))[0] for k in range(4)]
    assert len(texts[0]) == 12 and all(text == texts[0] for text in texts)


def test_every_variant_runs_equally_often_and_exactly_as_long(tiny: Tiny) -> None:
    pair = tiny.pair("sweep.repeats=2")
    variants = [Variant("none", 0), Variant("distilled", 2), Variant("distilled", 3)]
    calls: list[tuple[int, int]] = []
    prompts = workload(pair).measured
    speeds = measure_speeds(pair, variants, prompts, lambda done, total: calls.append((done, total)))
    assert calls == [(i, 12) for i in range(1, 13)]
    assert {speed.stats.num_new_tokens for speed in speeds.values()} == {2 * 2 * 12}


def test_spread_is_half_the_range_and_the_speed_of_medians() -> None:
    """Two prompts, three repeats; one of 10 tokens and one, cut by the context, of 5."""
    first = [Stats(num_new_tokens=10, num_rounds=5, seconds=seconds) for seconds in (1.0, 2.0, 5.0)]
    second = [Stats(num_new_tokens=5, num_rounds=5, seconds=seconds) for seconds in (1.0, 1.0, 0.5)]
    speed = measure._speed([first, second])
    assert speed.tokens_per_second == pytest.approx(15 / (2.0 + 1.0))
    assert speed.spread == pytest.approx((15 / 2.0 - 15 / 5.5) / 2)
    assert (speed.stats.num_new_tokens, speed.stats.seconds) == (45, 10.5)


BY_STEPS = "runtime.kernel=false"  # each step of a draft is a pass of its own


def clocked(monkeypatch: pytest.MonkeyPatch, pair: Pair, *, target: float, draft: float, rule: float = 0.0) -> None:
    """Each pass of the target, each pass of another model and each verdict take so long, and nothing else does."""
    clock, sessions = Clock(monkeypatch, "decoding", "experiments.timing"), type(pair.target.session())

    def seconds(session: Any, *_: Any, **__: Any) -> float:
        return target if session._decoder is pair.target else draft

    monkeypatch.setattr(sessions, "extend", clock.slowed(sessions.extend, seconds))
    monkeypatch.setattr(pair, "rule", clock.slowed(token_rule, rule))


def test_slow_target_is_reported_as_slow(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny.pair("sweep.num_prompts=1", "sweep.max_new_tokens=4", BY_STEPS)
    clocked(monkeypatch, pair, target=0.5, draft=0.0)
    speeds = measure_speeds(pair, [Variant("none", 0)], workload(pair).measured)
    plain = speeds[Variant("none", 0)]
    assert plain.tokens_per_second == 2.0
    assert plain.stats.num_new_tokens == 4 and plain.stats.seconds == 2.0


def test_a_slow_target_makes_a_draft_cheap(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny.pair(BY_STEPS)
    for seconds, ratio in ((0.5, 0.5), (8.0, 0.03125)):
        clocked(monkeypatch, pair, target=seconds, draft=0.25)
        costs = measure_costs(pair, "distilled", [1])
        assert (costs.target_step_seconds, costs.cost_ratio, costs.verify_cost[1]) == (seconds, ratio, 1.0)


def test_overhead_is_what_the_parts_of_a_round_do_not_explain(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny.pair(BY_STEPS)
    clocked(monkeypatch, pair, target=1.0, draft=0.25, rule=3.0)
    costs = measure_costs(pair, "distilled", [1, 3])
    assert (costs.target_step_seconds, costs.cost_ratio, costs.verify_cost) == (1.0, 0.25, {1: 1.0, 2: 1.0, 4: 1.0})
    assert costs.overhead == {1: 3.0, 3: 3.0}


def test_a_copy_of_the_target_accepts_all_and_pays_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, in which passes over one row and over more give the same p and q but for 1e-15."""
    overrides = [f"drafters={{self: {{path: '{tiny.run_dir}/target'}}}}", "decoding.drafter=self"]
    for temperature in (0, 1):
        pair = tiny.pair(*overrides, "runtime.dtype=float64", f"decoding.temperature={temperature}")
        clocked(monkeypatch, pair, target=1.0, draft=1.0, rule=1.0)
        result = break_it(pair, list(pair.config.drafters))
        baseline, copy = result.rows
        assert (baseline.name, baseline.speedup, baseline.acceptance_rate, baseline.cause) == (
            "baseline",
            1,
            None,
            None,
        )
        assert copy.name == "self" and copy.acceptance_rate == 1.0
        assert copy.expected_acceptance == pytest.approx(1.0, abs=1e-4)
        assert copy.mean_acceptance_length == pytest.approx(12 / 3)
        assert (copy.cost_ratio, copy.speedup) == (1.0, pytest.approx(4 / (3 + 1 + 1)))
        assert copy.cause is not None and copy.cause.startswith("costly draft")


def test_expected_acceptance_is_the_overlap_where_tokens_were_judged(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = tiny.pair()
    overlaps: list[float] = []

    def recording(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
        verdict = token_rule(p, proposal, chance)
        for position in range(len(proposal.ids)):
            q = proposal.row(torch.tensor([position]))
            overlaps.append(1 - float((p[position] - q).abs().sum()) / 2)  # 1 - TV(p, q)
            if position == int(verdict.num_accepted):
                break  # rejected here: what comes after was never judged
        return verdict

    monkeypatch.setattr(pair, "rule", recording)
    agreement = acceptance_on(pair, "mismatched", 3, pair.prompts(2))
    assert len(overlaps) == sum(agreement.stats.reached) < agreement.stats.num_drafted
    assert agreement.expected_acceptance == pytest.approx(sum(overlaps) / len(overlaps), abs=1e-5)
    near = acceptance_on(pair, "distilled", 3, pair.prompts(2))
    assert 0 < agreement.expected_acceptance < near.expected_acceptance <= 1


@pytest.mark.parametrize(
    ("name", "says"), [("target", r"^target produced NaN"), ("drafters/distilled", r"^drafter dis")]
)
def test_nan_weights_name_the_model(tiny_copy: Tiny, name: str, says: str) -> None:
    path = tiny_copy.run_dir / name / "model.safetensors"
    weights = {key: value.clone() for key, value in load_file(path).items()}
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    # break-it has Medusa heads among its rows, and those are of the target as it was.
    for command in ("generate", "sweep-k", *(("break-it",) if name != "target" else ())):
        answer = tiny_copy.specctl(command, "--no-train")
        assert answer.code == 1
        assert answer.one_line.removeprefix("specctl: ").startswith(says[1:]), answer.one_line
        assert "round 0" in answer.one_line


def test_generate_streams_the_rounds_that_it_counts(tiny: Tiny) -> None:
    rounds: list[Round] = []
    started: list[int] = []
    result = generate(tiny.pair(), lambda: started.append(len(rounds)), rounds.append)
    assert started == [0]
    assert [token for round_ in rounds for token in round_.emitted] == result.token_ids
    assert len(rounds) == result.stats["num_rounds"]
    assert len(result.token_ids) == result.stats["num_new_tokens"] == 12
    assert result.finish_reason == "length"


def test_a_cause_says_where_the_measurement_contradicts_it() -> None:
    prices = (0.05, 1.2, 0.1)
    assert _cause(0.6, 1.2, 4, *prices).startswith("pays") and "measured" not in _cause(0.6, 1.2, 4, *prices)
    assert _cause(0.6, 0.94, 4, *prices).endswith("measured 0.94x, less than theory allows")
    assert "measured" not in _cause(0.05, 0.7, 4, *prices)
    assert _cause(None, 1.0, 4, *prices).startswith("drafted nothing")
