"""What the experiments conclude follows from what they measured, and each measurement stands alone."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import Tiny
from torch import Tensor

from specctl.acceptance import Chance, Proposal, Verdict, token_rule
from specctl.events import Round
from specctl.experiments import measure
from specctl.experiments.break_it import break_it
from specctl.experiments.generate import generate
from specctl.experiments.measure import Variant, acceptance_on, measure_speeds
from specctl.experiments.pair import Pair
from specctl.experiments.sweep_k import SweepRow, best_row, explain, sweep_k
from specctl.experiments.timing import Costs, measure_costs
from specctl.models.llama import LlamaSession
from specctl.models.session import Forward
from specctl.stats import collect


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


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([row(0, 100), row(1, 120), row(2, 150)], 2),
        ([row(0, 100), row(1, 141), row(2, 150, spread=10)], 1),
        ([row(0, 100), row(1, 139), row(2, 150, spread=10)], 2),
        ([row(0, 100), row(1, 141, spread=50), row(2, 150)], 2),  # only the winner's spread counts
        ([row(0, 141), row(1, 145), row(2, 150, spread=10)], 0),
        ([row(2, 150, spread=10), row(1, 141), row(0, 100)], 1),
        ([row(0, 100)], 0),
    ],
)
def test_best_is_the_smallest_k_within_the_winners_spread(rows: list[SweepRow], best: int) -> None:
    assert best_row(rows).k == best


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
    assert result.best_k == best_row(result.rows).k


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
    speeds = measure_speeds(pair, variants, lambda done, total: calls.append((done, total)))
    assert calls == [(i, 12) for i in range(1, 13)]
    assert {speed.stats.num_new_tokens for speed in speeds.values()} == {2 * 2 * 12}


def test_spread_is_half_the_range_and_the_speed_the_median() -> None:
    repeats = [measure.Stats(num_new_tokens=10, seconds=seconds) for seconds in (1.0, 2.0, 5.0)]
    speed = measure._speed(repeats)
    assert (speed.tokens_per_second, speed.spread, speed.stats.num_new_tokens) == (5.0, 4.0, 30)


def test_slow_target_is_reported_as_slow(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny.pair("sweep.num_prompts=1", "sweep.max_new_tokens=4")
    slow_down(monkeypatch, pair)
    speeds = measure_speeds(pair, [Variant("none", 0)])
    plain = speeds[Variant("none", 0)]
    assert plain.tokens_per_second <= 20.0
    assert plain.stats.num_new_tokens == 4 and plain.stats.seconds >= 4 * 0.05


def test_a_slow_target_makes_a_draft_cheap(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny.pair()
    before = measure_costs(pair, "distilled", [1])
    slow_down(monkeypatch, pair, seconds=0.005)
    after = measure_costs(pair, "distilled", [1])
    assert after.target_step_seconds >= 0.005
    assert after.cost_ratio < before.cost_ratio
    assert after.verify_cost[1] == 1.0


def slow_down(monkeypatch: pytest.MonkeyPatch, pair: Pair, seconds: float = 0.05) -> None:
    """Each pass of the target, and of no draft, sleeps."""
    original: Callable[..., Forward] = LlamaSession.extend

    def sleeping(self: LlamaSession, ids: Tensor, num_logits: int | None = None) -> Forward:
        if self._decoder is pair.target:
            time.sleep(seconds)
        return original(self, ids, num_logits)

    monkeypatch.setattr(LlamaSession, "extend", sleeping)


def test_a_copy_of_the_target_accepts_all_and_pays_nothing(tiny: Tiny) -> None:
    overrides = [f"drafters={{self: {{path: '{tiny.run_dir}/target'}}}}", "decoding.drafter=self"]
    for temperature in (0, 1):
        result = break_it(tiny.pair(*overrides, f"decoding.temperature={temperature}"))
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
        assert copy.cost_ratio is not None and copy.cost_ratio > 0.5
        assert copy.cause is not None and copy.cause.startswith(("costly draft", "pays"))


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

    monkeypatch.setattr(measure, "token_rule", recording)
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
    for command in ("generate", "sweep-k", "break-it"):
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
