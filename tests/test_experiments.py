"""What the experiments conclude follows from what they measured, and each measurement stands alone."""

import random
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import pytest
import torch
from fakes import Clock, FakeModel
from safetensors.torch import load_file, save_file
from tiny_run import Tiny
from torch import Tensor

from specctl.acceptance import Chance, Proposal, Verdict, token_rule
from specctl.chance import SeededChance
from specctl.config import SweepConfig
from specctl.config_file import default_config_path, load_config
from specctl.decoding import speculative
from specctl.drafters.draft_model import DraftModel
from specctl.events import Round
from specctl.experiments import intervals
from specctl.experiments.agreement import agreement_on
from specctl.experiments.break_it import break_it
from specctl.experiments.generate import generate
from specctl.experiments.intervals import Timings, by_category, by_prompt, length_interval, speedup_interval
from specctl.experiments.measure import Bench, Variant, speed_of
from specctl.experiments.pair import Pair
from specctl.experiments.sweep_k import sweep_k
from specctl.experiments.workload import EncodedPrompt, workload
from specctl.sampling import SamplingLaw
from specctl.stats import Stats, collect
from specctl.stopping import StopRules

# How sure a speed is. A "run" here is made up: 100 tokens at a true speed, with noise.


def runs(speeds: list[list[float]], rounds: int = 50) -> list[list[Stats]]:
    """Runs of 100 tokens, [repeat][prompt], given the speeds of each prompt's repeats."""
    return [
        [Stats(num_new_tokens=100, num_rounds=rounds, seconds=100 / speed) for speed in repeat]
        for repeat in zip(*speeds, strict=True)
    ]


def timings(speeds: list[list[float]]) -> Timings:
    return speed_of(runs(speeds)).timings


def noisy(
    speed: float, noise: float, draws: random.Random, num_prompts: int = 4, repeats: int = 3
) -> list[list[float]]:
    """Prompts of unlike difficulty, the same for every K, and noise on each run."""
    return [
        [speed * (1 + index / 2) * (1 + draws.gauss(0, noise)) for _ in range(repeats)] for index in range(num_prompts)
    ]


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_one_noisy_repeat_changes_nothing(factor: float) -> None:
    draws = random.Random(0)
    speeds = {k: noisy(speed, 0.02, draws, num_prompts=8) for k, speed in {0: 100, 1: 115, 4: 140, 7: 141}.items()}
    before = {k: speed_of(runs(found)) for k, found in speeds.items()}
    for k in speeds:
        disturbed = {other: [list(repeats) for repeats in found] for other, found in speeds.items()}
        for repeats in disturbed[k]:
            repeats[1] *= factor  # the machine was busy, or idle, during one whole repeat of this K
        after = {other: speed_of(runs(found)) for other, found in disturbed.items()}
        assert after[k].tokens_per_second == pytest.approx(before[k].tokens_per_second, rel=0.03)
        assert after[k].spread > 5 * before[k].spread  # the spread tells of it


def test_there_are_enough_repeats_for_a_median() -> None:
    """The median of two runs is their mean, and one disturbed run moves it."""
    assert SweepConfig().repeats >= 3 and load_config(default_config_path()).sweep.repeats >= 3


def test_intervals_are_paired_seeded_and_of_totals() -> None:
    plain = timings([[100.0], [50.0], [10.0]] * 2)
    twice = timings([[200.0], [100.0], [20.0]] * 2)
    assert speedup_interval(twice, plain, 0) == pytest.approx((2.0, 2.0))  # unlike prompts, but paired
    mixed = timings([[100.0], [100.0], [30.0]] * 2)
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


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_too_few_prompts_give_no_interval(count: int) -> None:
    """From two prompts an interval of the bootstrap holds in half of all cases at best, from three in 3 of 4."""
    plain, fast = timings([[1.0 + n] for n in range(count)]), timings([[2.0 + n] for n in range(count)])
    assert speedup_interval(fast, plain, 0) is length_interval(fast, 0) is None
    six = timings([[1.0 + n] for n in range(6)])
    assert speedup_interval(timings([[2.0 + n] for n in range(6)]), six, 0) is not None


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
    assert code.speedup_interval is prose.speedup_interval is None
    assert by_category(prompts[3:], fast.only([3]), plain.only([3]), 0) == []
    assert by_category(prompts, fast, None, 0)[0].speedup is None


def test_sweep_rows(tiny: Tiny) -> None:
    result = sweep_k(tiny.pair(), "distilled")
    assert [row.k for row in result.rows] == [0, 1, 3]
    plain = result.rows[0]
    assert (plain.speedup, plain.predicted_speedup, plain.prediction_agrees) == (1.0, 1.0, None)
    assert plain.acceptance_rate is None and plain.mean_acceptance_length == 1.0
    fresh = {found.k for found in result.rows if found.is_fresh}
    assert fresh == ({result.best_k} - {0} if result.best_k is not None else set(result.undecided))
    for found in result.rows[1:]:
        if not {found.k, 0} & fresh:  # fresh ones have plain decoding of their own beside them
            assert found.speedup == pytest.approx(found.tokens_per_second / plain.tokens_per_second)
        assert found.num_repeats == 1
        assert found.acceptance_rate is not None and 0 < found.acceptance_rate <= 1
        assert found.mean_acceptance_length is not None and 1 < found.mean_acceptance_length <= found.k + 1
    assert sorted(result.verify_cost) == [1, 2, 4] and result.verify_cost[1] == 1.0
    assert len(result.conditional_acceptance) == 3
    assert result.best_k in (0, 1, 3, None)
    assert [found.id for found in result.rows[1].by_prompt] == ["validation-0", "validation-1"]
    assert result.rows[1].by_category == [] and result.note is not None  # two prompts give no intervals


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
        seen["agreement" if options.get("request", 0) >= 1_000_000 else "speed"].append(tuple(prompt))
        return original(prompt, **options)

    monkeypatch.setattr(pair, "events", watching)
    sweep_k(pair, "distilled")
    assert len(set(seen["agreement"])) == 2 and len(set(seen["speed"])) == 2
    assert not set(seen["agreement"]) & set(seen["speed"])


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


def test_every_variant_runs_equally_often_and_texts_end_as_a_users_do(tiny: Tiny) -> None:
    variants = [Variant("none", 0), Variant("distilled", 2), Variant("distilled", 3)]
    calls: list[tuple[int, int]] = []
    for ignored in (False, True):
        pair = tiny.pair("decoding.stop_token_ids=[7, 32, 101, 110]", f"sweep.ignore_eos={ignored}")
        bench = Bench(pair, workload(pair).measured, lambda done, total: calls.append((done, total)))
        bench.run(variants, 2)
        tokens = {bench.speed(variant).stats.num_new_tokens for variant in variants}
        assert (tokens == {2 * 2 * 12}) is ignored and max(tokens) <= 2 * 2 * 12
    assert calls[:4] == [(3, 12), (6, 12), (9, 12), (12, 12)]


def test_acceptance_is_that_of_the_text_a_user_gets(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case K37: behind the end token both models know a loop by heart, which nobody reads."""
    p, q = [0.5, 0.1, 0.1, 0.05, 0.05, 0.05, 0.15], [0.05, 0.05, 0.05, 0.1, 0.1, 0.5, 0.15]

    def logits(law: list[float]) -> Callable[[Sequence[int]], Tensor]:
        def after(prefix: Sequence[int]) -> Tensor:
            if 6 not in prefix:
                return torch.tensor(law, dtype=torch.float64).log()
            return torch.full((7,), -30.0, dtype=torch.float64).index_fill(0, torch.tensor([len(prefix) % 6]), 30.0)

        return after

    target, draft = FakeModel(logits(p), 7), FakeModel(logits(q), 7, name="draft")
    drafter = DraftModel(draft, "draft")
    found = {}
    for ends in (frozenset({6}), frozenset[int]()):
        stats = Stats()
        for request in range(150):
            events = speculative(
                target,
                drafter,
                [0],
                num_speculative_tokens=4,
                law=SamplingLaw(),
                chance=SeededChance(0, request),
                stop=StopRules(max_new_tokens=120, eos_token_ids=ends),
            )
            collect(events, stats)
        found[bool(ends)] = stats
    assert found[False].acceptance_rate > 0.7 > 0.3 > found[True].acceptance_rate
    pair = tiny.pair()
    ends = pair.stop_rules().eos_token_ids
    assert ends and pair.sweep_stop().eos_token_ids == ends
    assert pair.sweep_stop().max_new_tokens == pair.config.sweep.max_new_tokens
    assert not tiny.pair("sweep.ignore_eos=true").sweep_stop().can_end


def test_spread_is_half_the_range_and_the_speed_of_medians() -> None:
    """Two prompts, three repeats; one of 10 tokens and one, cut by the context, of 5."""
    first = [Stats(num_new_tokens=10, num_rounds=5, seconds=seconds) for seconds in (1.0, 2.0, 5.0)]
    second = [Stats(num_new_tokens=5, num_rounds=5, seconds=seconds) for seconds in (1.0, 1.0, 0.5)]
    speed = speed_of(list(zip(first, second, strict=True)))
    assert speed.tokens_per_second == pytest.approx(15 / (2.0 + 1.0))
    assert speed.spread == pytest.approx((15 / 2.0 - 15 / 5.5) / 2)
    assert (speed.stats.num_new_tokens, speed.stats.seconds) == (45, 10.5)


def test_tokens_and_rounds_are_counted_over_all_repeats_and_only_the_clock_by_its_median() -> None:
    """Three texts of one prompt: how many tokens a round emitted is chance, and no run of it a disturbance."""
    repeats = [[Stats(num_new_tokens=12, num_rounds=rounds, seconds=rounds * 0.5)] for rounds in (3, 4, 8)]
    found = speed_of(repeats).timings
    assert (found.tokens[0], found.rounds[0], found.seconds[0]) == (12, 5, 2.5)


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
    bench = Bench(pair, workload(pair).measured)
    bench.run([Variant("none", 0)], 1)
    plain = bench.speed(Variant("none", 0))
    assert plain.tokens_per_second == 2.0
    assert plain.stats.num_new_tokens == 4 and plain.stats.seconds == 2.0


def test_a_copy_of_the_target_accepts_all_and_pays_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [f"drafters={{self: {{path: '{tiny.run_dir}/target'}}}}", "decoding.drafter=self", BY_STEPS]
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
        assert copy.cost_ratio is not None and copy.cost_ratio > 0
        assert copy.cause == "draft cost"  # agreement is perfect already


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
    agreement = agreement_on(pair, "mismatched", 3, pair.prompts(2))
    assert len(overlaps) == sum(agreement.stats.reached) < agreement.stats.num_drafted
    assert agreement.expected_acceptance == pytest.approx(sum(overlaps) / len(overlaps), abs=1e-5)
    near = agreement_on(pair, "distilled", 3, pair.prompts(2))
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
    result = generate(tiny.pair(), lambda prompt: started.append(len(rounds)), rounds.append)
    assert started == [0]
    assert [token for round_ in rounds for token in round_.emitted] == result.token_ids
    assert len(rounds) == result.stats["num_rounds"]
    assert len(result.token_ids) == result.stats["num_new_tokens"] == 12
    assert result.finish_reason == "length"
