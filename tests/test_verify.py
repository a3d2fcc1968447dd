"""`specctl verify`: the exact rules pass, every planted bug is caught by its parts, and p-values mean what they say."""

import json
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from tiny_run import Tiny

from benchmarks import verify_pvalues
from specctl.acceptance import block_rule, token_rule, typical_rule
from specctl.continuation import draw_with
from specctl.decoding import Rule
from specctl.drafters.draft_model import DraftModel
from specctl.drafters.fast_rule import kernel_token_rule
from specctl.experiments.verify import statistics, verdict
from specctl.experiments.verify.checks import RunPlan, run_planted, sampled_run
from specctl.experiments.verify.enumeration import CASES, TOLERANCE, distance_to_law, enumerate_cases
from specctl.experiments.verify.greedy import greedy
from specctl.experiments.verify.planted import BUGS, ENUMERATION, SAMPLING, Bug
from specctl.experiments.verify.recording import record
from specctl.experiments.verify.rescore import RescoreFigures, _compare, rescore
from specctl.experiments.verify.sampling_law import Evidence, SamplingFigures, _LeakTest, add_request, judge
from specctl.experiments.verify.subject import Parts, Subject, subject
from specctl.experiments.verify.toys import ToyDrafter, random_llama, toy, with_law
from specctl.experiments.verify.wrappers import WrappedModel
from specctl.models.kernel.decoder import KernelDecoder, why_not_kernel
from specctl.models.llama import Llama
from specctl.models.llama_decoder import LlamaDecoder
from specctl.models.session import Forward, Session
from specctl.sampling import SamplingLaw

RATE = 1e-3
RULES: dict[str, Rule] = {"token": token_rule, "block": block_rule}
QUICK = [case for case in CASES if (case.target, case.k) in (("HISTORY", 2), ("MARKOV", 1))]


def plan(num_tokens: int = 600, k: int = 3, seed: int = 0) -> RunPlan:
    return RunPlan(prompts=[[0, 1, 2], [1, 1]], k=k, seed=seed, num_tokens=num_tokens, request_tokens=50)


@pytest.mark.parametrize("rule", RULES)
def test_exact_rules_keep_the_law_on_the_toys(rule: str) -> None:
    figures = enumerate_cases(RULES[rule], QUICK)
    assert figures.holds and figures.num_branches > 150


def test_the_cases_are_those_that_the_verdict_names() -> None:
    assert {(case.target, case.k) for case in CASES} == {
        (target, k) for target in ("CONST", "MARKOV", "HISTORY") for k in (1, 2, 3, 4)
    }
    assert {case.drafter for case in CASES} == {"draft_model", "ngram", "medusa"}
    assert all(case.num_tokens > case.k for case in CASES)  # or K tokens are never drafted


def test_a_lossy_rule_is_seen_by_every_part_that_can() -> None:
    def typical(p, proposal, chance):  # type: ignore[no-untyped-def]
        return typical_rule(p, proposal, chance, epsilon=0.09, delta=0.3)

    assert enumerate_cases(typical, QUICK[:3]).worst > 1e-3
    rescored, sampling = sampled_run(toy("MARKOV", vocab_size=32, rule=typical), plan(400), RATE)
    assert not rescored.holds
    assert sampling.p_value < RATE and sampling.leak is not None and sampling.leak.interval[0] > 0


@pytest.mark.parametrize("drafter", ["draft_model", "medusa", "ngram"])
@pytest.mark.parametrize("rule", RULES)
def test_a_clean_run_holds(rule: str, drafter: ToyDrafter) -> None:
    law = SamplingLaw(temperature=0.8, top_p=0.95, presence_penalty=0.3, repetition_penalty=1.2)
    tested = toy("HISTORY", drafter, rule=RULES[rule], law=law)
    rescored, sampling = sampled_run(tested, plan(90), RATE)
    assert rescored.holds and rescored.num_q > 30 and rescored.worst_p < 1e-12 and rescored.worst_q < 1e-12
    assert sampling.num_tokens == 90 and sampling.p_value >= RATE
    if drafter == "medusa":
        assert rescored.num_p > 90  # rows after rejected drafts too
    figures = greedy({"a": (tested, (1, 4))}, [[0, 1], [2]], gap=1e-10, num_tokens=8)
    assert figures.holds and not figures.differences and figures.num_runs == 4


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.toy], ids=lambda bug: bug.name)
def test_every_planted_bug_is_caught(bug: Bug) -> None:
    """What breaks the law is seen without enumeration too."""
    num_tokens = 500 if SAMPLING in bug.caught_by else 150
    tested = toy(bug.toy, vocab_size=3 if bug.toy == "HISTORY" else 32)
    (row,) = run_planted(tested, plan(num_tokens), false_alarm_rate=RATE, gap=1e-10, bugs=[bug])
    assert row.as_expected, row
    assert row.keeps_law or set(row.caught) - {ENUMERATION}
    assert row.total_variation is not None
    assert (row.total_variation <= TOLERANCE) == bug.keeps_law


@pytest.fixture(scope="module")
def in_kernel() -> Subject:
    """A random pair whose draws and rule run in the kernel."""
    shape = replace(random_llama(0, 24).shape, hidden_size=16, intermediate_size=16, head_dim=16)
    module, models = Llama(shape).eval(), []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():  # the draft is the target, and noise
            for weight in module.parameters():
                if weight.dim() == 2:
                    weight.copy_(
                        weight * bool(seed) + (0.1 if seed else 0.4) * torch.randn(weight.shape, generator=generator)
                    )
        if reason := why_not_kernel(shape, torch.float32, torch.device("cpu")):
            pytest.skip(reason)
        models.append(KernelDecoder(module, "m", dtype=torch.float32))
    law = SamplingLaw()
    drafter = DraftModel(models[1], "draft", draw=draw_with(models[1], law))
    parts = Parts(
        target=models[0],
        drafter=drafter,
        law=law,
        draft_law=law,
        rule=kernel_token_rule,
        device=torch.device("cpu"),
        draw=draw_with(models[0], law),
    )
    return subject(parts, dtype=torch.float32)


def test_a_clean_run_in_the_kernel_holds(in_kernel: Subject) -> None:
    rescored, sampling = sampled_run(in_kernel, plan(600), RATE)
    assert in_kernel.clean.path == "draws and rule in the kernel" and rescored.holds and sampling.p_value >= RATE
    assert in_kernel.clean.step_by_step().path == "step by step"


@pytest.mark.parametrize("bug", [bug for bug in BUGS if not bug.toy], ids=lambda bug: bug.name)
def test_every_bug_of_the_kernels_path_is_caught_on_it(bug: Bug, in_kernel: Subject) -> None:
    """The real draw and the real rule run, bent; where there is no kernel the bug is left out by name."""
    (row,) = run_planted(in_kernel, plan(2500), false_alarm_rate=RATE, gap=0, bugs=[bug])
    assert row.as_expected and row.path == "draws and rule in the kernel", row
    assert row.missing is None and row.total_variation is None
    (row,) = run_planted(toy("MARKOV"), plan(60), false_alarm_rate=RATE, gap=0, bugs=[bug])
    assert row.missing == "the kernel" and row.as_expected


def test_bugs_of_all_models_run_on_the_pairs_own_path(in_kernel: Subject) -> None:
    """Only those that bend single draws need another one, and are said to have run there."""
    paths = {bug.name: bug.planted_in(in_kernel).clean.path for bug in BUGS if bug.law is None}
    assert paths["a hole in the draft's cache"] == paths["a lost bonus token"] == "draws and rule in the kernel"
    assert paths["argmax judged as sampled"] == "step by step"
    bugs = [bug for bug in BUGS if bug.name in ("a hole in the draft's cache", "a stale row in the target's cache")]
    rows = run_planted(in_kernel, plan(300), false_alarm_rate=RATE, gap=0, bugs=bugs)
    assert all(row.rescore is not None and not row.rescore.holds for row in rows)


def test_bugs_under_the_block_rule() -> None:
    names = ("residual turned round", "a lost bonus token", "argmax judged as sampled")
    bugs = [bug for bug in BUGS if bug.name in names]
    rows = run_planted(
        toy("MARKOV", vocab_size=8, rule=block_rule), plan(400), false_alarm_rate=RATE, gap=1e-10, bugs=bugs
    )
    assert len(rows) == 3 and all(row.as_expected for row in rows)


def test_a_bug_that_nothing_sees_is_not_as_expected() -> None:
    harmless = replace(BUGS[0], plant=lambda parts: parts)
    (row,) = run_planted(toy("MARKOV"), plan(100), false_alarm_rate=RATE, gap=1e-10, bugs=[harmless])
    assert row.caught == () and not row.as_expected
    too_loud = replace(BUGS[1], keeps_law=True)
    (row,) = run_planted(toy("MARKOV"), plan(400), false_alarm_rate=RATE, gap=1e-10, bugs=[too_loud])
    assert row.caught and not row.as_expected


def test_bugs_that_a_drafter_cannot_have_are_left_out_by_name() -> None:
    tested = toy("MARKOV", "ngram")
    bugs = [bug for bug in BUGS if bug.needs(tested)]
    rows = run_planted(tested, plan(60), false_alarm_rate=RATE, gap=1e-10, bugs=bugs)
    missing = {row.name: row.missing for row in rows if row.missing}
    assert missing["argmax judged as sampled"] == "a drafter that draws its tokens"
    assert missing["a hole in the draft's cache"] == "a draft model"
    assert missing["positions off by one after a rollback"] == "a target of the native decoder"


# The statistics


def test_uniformity_is_scipys_from_above() -> None:
    """Never below the exact p-value, and close to it where an alarm is near."""
    for count in (50, 400):
        for seed in range(12):
            values = np.random.default_rng(seed).random(count) ** (1 + 0.1 * seed)
            exact = scipy.stats.kstest(values, "uniform", method="exact").pvalue
            assert exact <= statistics.uniformity(values) * (1 + 1e-9)
            assert not 1e-6 < exact < 0.01 or statistics.uniformity(values) < 2 * exact


def test_holm() -> None:
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]


def test_every_bet_has_mean_one() -> None:
    """What Ville's inequality needs, for events of any probability and for products with a uniform number."""
    uniform = (np.arange(100_000) + 0.5) / 100_000 - 0.5
    for stake in (-3.0, -0.7, 0.0, 1e-5, 0.2, 2.5):
        for probability in (0.0, 1e-4, 0.3, 0.999, 1.0):
            of = [np.exp(statistics.event_bets(*np.array([[probability], [y], [stake]]))) for y in (0.0, 1.0)]
            assert (1 - probability) * of[0] + probability * of[1] == pytest.approx(1)
        for first in (-0.5, 0.0, 1e-6, 0.31):
            bets = statistics.product_bets(np.full(len(uniform), first), uniform, stake)
            assert np.exp(bets).mean() == pytest.approx(1, abs=1e-8)


def test_stakes_do_not_look_ahead() -> None:
    variance = np.random.default_rng(0).random(50) / 4
    other = np.concatenate([variance[:20], np.zeros(30)])
    assert np.array_equal(statistics.stakes(variance, 1e-4)[:21], statistics.stakes(other, 1e-4)[:21])


def alarms_of(p_values: Iterable[float], rate: float) -> int:
    return sum(p_value <= rate for p_value in p_values)


@pytest.mark.parametrize("name", verify_pvalues.CASES)
def test_nearly_deterministic_laws_raise_no_more_alarms_than_stated(name: str) -> None:
    """A normal approximation alarms in 1 % of such runs. At 1e-3, more than 4 of 400 have a chance of 8e-5."""
    figures = [verify_pvalues.CASES[name].figures(seed) for seed in range(400)]
    assert alarms_of((each.p_value for each in figures), RATE) <= 4
    assert all(each.tests[-1].name == "leak" and each.tests[-1].num_values > 300 for each in figures)


def test_a_position_that_is_wrong_is_seen_at_that_position() -> None:
    """Too few values of position 1 are off for any test of all tokens together."""
    generator = np.random.default_rng(0)

    def figures(off: bool) -> SamplingFigures:
        count = 3000
        positions, values = np.arange(count) % 20, generator.random(count)
        wrong = np.where((positions == 1) & off, values**2.5, values)
        nothing = [np.zeros(count)]
        return judge(
            Evidence(
                num_positions=20,
                by_id=[generator.random(count)],
                by_rank=[wrong],
                positions=[positions.astype(float)],
                in_surplus=nothing,
                surplus=nothing,
                distance=nothing,
            ),
            RATE,
        )

    least = min(figures(True).tests, key=lambda test: test.adjusted)
    assert (least.name, least.num_values) == ("uniform at position 1", 150) and least.adjusted < RATE
    assert all(test.adjusted > RATE for test in figures(True).tests if test.name != least.name)
    assert figures(False).p_value > RATE


def test_neighbours_that_go_together_are_seen() -> None:
    generator = np.random.default_rng(0)
    values = generator.random(600)
    values[1::2] = (values[::2] + 0.15 * generator.random(300)) % 1
    evidence = Evidence(by_id=[generator.random(600)], by_rank=[values], positions=[np.zeros(600)])
    for each in (evidence.in_surplus, evidence.surplus, evidence.distance):
        each.append(np.zeros(600))
    tests = {test.name: test.adjusted for test in judge(evidence, RATE).tests}
    assert tests["serial correlation, by rank"] < RATE < min(tests["uniform, by id"], tests["uniform, by rank"])


def test_the_tests_are_adjusted_for_those_that_had_nothing_to_look_at() -> None:
    """Which positions were reached depends on what was drawn, so the number of tests may not depend on it."""
    _, sampling = sampled_run(toy("MARKOV", "ngram"), plan(60, k=6), RATE)
    assert [test.name for test in sampling.tests][2:9] == [f"uniform at position {i}" for i in range(7)]
    assert sampling.tests[8].num_values < 5


def test_p_values_are_no_smaller_than_uniform_ones_under_the_law() -> None:
    """A quick sample; benchmarks/verify_pvalues.py has thousands. Alarms at 1e-4, so a chance of 4e-4 to fail."""
    tested = toy("MARKOV")
    found: dict[str, list[float]] = {}
    for seed in range(30):
        _, sampling = sampled_run(tested, plan(90, seed=seed), RATE)
        for test in sampling.tests:
            found.setdefault(test.name, []).append(test.p_value)
    for name in ("uniform, by id", "uniform, by rank", "serial correlation, by rank", "leak"):
        assert len(found[name]) == 30
        assert scipy.stats.kstest(found[name], "uniform", alternative="greater").pvalue > 1e-4, name


def test_the_leak_of_following_the_draft_is_one() -> None:
    """Emit what the draft says, always: lambda is 1 by definition."""
    (turned,) = (bug for bug in BUGS if bug.name == "residual turned round")  # min(p, q) + (q - p)+ = q
    _, sampling = sampled_run(turned.planted_in(toy("MARKOV")), plan(500), RATE)
    assert sampling.leak is not None
    assert sampling.leak.interval[0] < 1 < sampling.leak.interval[1]
    assert sampling.leak.smallest_seen is not None and 0 < sampling.leak.smallest_seen < 1


@pytest.mark.parametrize(("count", "surplus", "distance"), [(4000, 0.6, 0.3), (500, 0.6, 0.3), (8000, 0.998, 0.004)])
@pytest.mark.parametrize("num_positions", [1, 40])
def test_a_leak_of_the_smallest_size_is_mostly_seen(
    count: int, surplus: float, distance: float, num_positions: int
) -> None:
    """The stated power, of the adjusted p-value: a mixture that follows the draft with probability lambda.

    A power of 0.8 gives fewer than 80 of 120 with a chance of 2e-4, one of 0.9 more than 118 with one of 4e-5. With 44
    tests that a leak does not touch, the bound that is not adjusted for them would see far fewer.
    """
    generator = np.random.default_rng(1)

    def evidence(leak: float) -> Evidence:
        ones = np.ones(count)
        in_surplus = (generator.random(count) < surplus - leak * distance).astype(float)
        uniform = generator.random((2, count))
        return Evidence(
            num_positions=num_positions,
            by_id=[uniform[0]],
            by_rank=[uniform[1]],
            positions=[-ones],  # no value at any position
            in_surplus=[in_surplus],
            surplus=[surplus * ones],
            distance=[distance * ones],
        )

    leak = judge(evidence(0.0), RATE).leak
    assert leak is not None and leak.smallest_seen is not None
    alarms = sum(judge(evidence(leak.smallest_seen), RATE).tests[-1].adjusted < RATE for _ in range(120))
    assert 80 <= alarms <= 118


def test_the_interval_of_a_leak_holds_where_its_sum_is_no_normal_number() -> None:
    """95 % and more of the runs, of which 120 miss more than 16 with a chance of 2e-4."""
    generator, count, misses = np.random.default_rng(2), 2000, 0
    for _ in range(120):
        ones, in_surplus = np.ones(count), (generator.random(count) < 0.999 - 0.5 * 0.002).astype(float)
        tested = _LeakTest(surplus=0.999 * ones, in_surplus=in_surplus, distance=0.002 * ones)
        leak = tested.figures(1e-4)
        assert leak is not None and leak.smallest_seen is None  # the text says to raise --tokens
        misses += not leak.interval[0] <= 0.5 <= leak.interval[1]
    assert misses <= 16


def test_too_few_tokens_make_no_test() -> None:
    _, sampling = sampled_run(toy("MARKOV"), plan(20), RATE)
    assert sampling.tests == [] and sampling.leak is None and sampling.p_value == 1.0


# Rescore, row by row


def test_rows_differ_by_rounding_or_are_wrong() -> None:
    fresh = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.5, 0.3, 0.2, 0.0]])
    near = fresh + torch.tensor([1e-6, -1e-6, 0, 0])
    assert _compare(near, fresh, 1e-4)[1] == 0
    assert _compare(fresh[:, [1, 0, 2, 3]], fresh, 1e-4)[1] == 2
    assert _compare(fresh * torch.nan, fresh, 1e-4)[1] == 2


def test_a_filter_may_keep_another_of_two_equals_and_no_other_token() -> None:
    fresh = torch.tensor([[0.5, 0.3, 0.2, 0.0, 0.0]])
    swapped = torch.tensor([[0.5, 0.3, 0.0, 0.2, 0.0]])
    unfiltered = torch.tensor([[0.5, 0.3, 0.2, 0.1, 0.1]]) / 1.2
    likely_gone = torch.tensor([[0.0, 0.6, 0.4, 0.0, 0.0]])
    assert _compare(swapped, fresh, 1e-4)[1:] == (0, 1)
    assert _compare(unfiltered, fresh, 1e-4)[1:] == (1, 0)
    assert _compare(likely_gone, fresh, 1e-4)[1:] == (1, 0)


@pytest.mark.parametrize("filters", [{"top_k": 4}, {"top_p": 0.5}])
def test_a_filter_that_keeps_one_token_more_is_seen(filters: dict[str, float]) -> None:
    """Each row alone could be an accident of rounding; all of them cannot."""
    tested = with_law(toy("MARKOV", vocab_size=32), SamplingLaw(**filters))  # type: ignore[arg-type]
    assert sampled_run(tested, plan(100), RATE)[0].holds
    wider = replace(tested.clean.law, top_k=5) if "top_k" in filters else replace(tested.clean.law, top_p=0.53)
    rescored, _ = sampled_run(replace(tested, parts=replace(tested.clean, law=wider)), plan(100), RATE)
    assert not rescored.holds
    assert rescored.num_wrong_p or rescored.is_filtered_otherwise


def test_a_draft_that_reads_a_window_is_said_to_be_skipped() -> None:
    tested = toy("MARKOV")
    short = random_llama(1, 3)
    short.shape = replace(short.shape, max_position_embeddings=16)
    draft = LlamaDecoder(short, "draft", dtype=torch.float64, device=torch.device("cpu"))
    clean = replace(tested.clean, drafter=DraftModel(draft, "draft"))
    rescored, sampling = sampled_run(replace(tested, clean=clean, parts=clean), plan(120), RATE)
    assert rescored.holds and rescored.num_skipped_q > 0
    assert sampling.p_value >= RATE


def test_rows_off_the_path_are_looked_at_in_one_round_of_24_from_the_last_on() -> None:
    tested = toy("MARKOV", vocab_size=32)
    request = record(tested.parts, [0, 1, 2], k=3, seed=0, request=0, num_tokens=200)
    rejecting = [index for index, r in enumerate(request.rounds) if r.num_accepted < len(r.drafted)]
    looked_at = rejecting[::-24]
    assert len(looked_at) > 2

    def rescored(field: str, spoiled: Iterable[int] = ()) -> RescoreFigures:
        """The rows of p or q after the first rejected draft turned round, in some rounds."""
        figures, rounds = RescoreFigures(tolerance=tested.tolerance), list(request.rounds)
        for index in spoiled:
            rows, first = getattr(rounds[index], field), rounds[index].num_accepted + 1
            rounds[index] = replace(rounds[index], **{field: torch.cat((rows[:first], rows[first:].flip(1)))})
        rescore(tested, replace(request, rounds=rounds), figures)
        return figures

    others = set(rejecting) - set(looked_at)
    for field in ("p", "q"):
        counts = {index: len(getattr(r, field)) - r.num_accepted - 1 for index, r in enumerate(request.rounds)}
        assert any(counts[index] for index in looked_at) and any(counts[index] for index in others)
        assert rescored(field).holds and rescored(field, others).holds
        for index in looked_at:
            assert getattr(rescored(field, [index]), f"num_wrong_{field}") == counts[index]
    assert rescored("p").num_p == 200 + sum(
        len(request.rounds[i].p) - request.rounds[i].num_accepted - 1 for i in looked_at
    )


# Greedy: a tie and a bug


class _Nudged:
    """A session whose logits of token 0 are higher where more than one row is computed at once."""

    def __init__(self, session: Session, by: float) -> None:
        self._session, self._by = session, by
        self.keep = session.keep

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._session.lengths

    def extend(self, ids: torch.Tensor, num_logits: int | None = None) -> Forward:
        forward = self._session.extend(ids, num_logits)
        logits = forward.logits.clone()
        logits[..., 0] += self._by * (ids.shape[1] > 1)
        return Forward(logits, forward.hidden)


@pytest.mark.parametrize(("gap", "is_tie"), [(1e-6, True), (0.1, False)])
def test_a_greedy_difference_is_a_tie_or_a_bug(gap: float, is_tie: bool) -> None:
    tested = toy("CONST")
    table = tested.clean.target
    logits = torch.tensor([1.0, 1.0 + gap, 0.0], dtype=torch.float64).repeat(3, 1)
    table.logits = logits  # type: ignore[attr-defined]
    parts = replace(tested.clean, target=WrappedModel(table, lambda session: _Nudged(session, 2 * gap)))
    figures = greedy({"a": (replace(tested, parts=parts), (2,))}, [[1, 2]], gap=1e-4, num_tokens=6)
    (difference,) = figures.differences
    assert difference.is_tie is is_tie and figures.holds is is_tie
    assert (difference.position, difference.gap) == (0, pytest.approx(gap))


def test_records_hold_what_was_used() -> None:
    tested: Subject = with_law(toy("HISTORY"), SamplingLaw(temperature=0.7))
    request = record(tested.parts, [0, 1], k=2, seed=3, request=0, num_tokens=30)
    assert request.num_new_tokens == 30
    assert [r.start for r in request.rounds][1:] == [r.start + len(r.emitted) for r in request.rounds][:-1]
    assert all(len(r.p) == len(r.drafted) + 1 == len(r.q) + 1 for r in request.rounds)
    evidence, laws = Evidence(), torch.full((30, 3), 1 / 3)
    add_request(evidence, request, laws, torch.Generator().manual_seed(0))
    assert len(evidence.by_id[0]) == 30 and evidence.by_id[0].min() >= 0 and evidence.by_id[0].max() <= 1
    assert RescoreFigures(tolerance=1e-4).holds and not RescoreFigures(tolerance=1e-4, num_short=1).holds


def test_distance_is_total_variation() -> None:
    tested = toy("CONST")
    assert distance_to_law(tested, k=1, num_tokens=2)[0] <= TOLERANCE
    (turned,) = (bug for bug in BUGS if bug.name == "residual turned round")
    # p = (.1, .6, .3), q = (.1, .3, .6) at the first token; the second has the budget for a plain step only
    assert distance_to_law(turned.planted_in(tested), k=1, num_tokens=2)[0] == pytest.approx(0.3)


# The command


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command on fewer toys and shorter greedy texts."""
    monkeypatch.setattr(verdict, "CASES", QUICK[:3])
    monkeypatch.setattr(verdict, "_GREEDY_TOKENS", 8)


@pytest.mark.usefixtures("light")
def test_the_command_holds_and_says_what_it_found(tiny: Tiny) -> None:
    answer = tiny.specctl("verify", "--tokens", "200", "--drafter", "distilled", "--k", "2")
    assert answer.code == 0, answer.err
    for part in ("enumeration", "rescore", "sampling law", "greedy"):
        assert part in answer.out
    assert "keeps the target's law" in answer.out
    assert "about" in answer.err and "200 sampled tokens" in answer.err


@pytest.mark.usefixtures("light")
def test_json_and_every_drafter(tiny: Tiny) -> None:
    answer = tiny.specctl("verify", "--tokens", "150", "--json", "--rule", "block", "--temperature", "0")
    document = answer.json
    assert (answer.code, document["holds"], document["rule"], document["temperature"]) == (0, True, "block", 1.0)
    assert [finding["part"] for finding in document["findings"]] == ["enumeration", "rescore", "sampling law", "greedy"]
    greedy_figures = document["findings"][3]["figures"]
    assert greedy_figures["drafters"] == ["aligned", "distilled", "mismatched", "medusa"]
    assert greedy_figures["num_runs"] == 2 * (3 * 8 + 4)
    assert "temperature 1" in document["note"].lower()
    stored = json.loads((tiny.run_dir / "results" / "verify.json").read_text(encoding="utf-8"))
    assert stored == document
    in_kernel = tiny.pair().target.capabilities.draws
    assert document["paths"]["draws of target"] == ("kernel" if in_kernel else "step by step")
    assert document["paths"]["rule"] == "step by step"  # the block rule has no other form
    assert document["path"] == ("draws in the kernel" if in_kernel else "step by step")


@pytest.mark.usefixtures("light")
def test_planted_bugs_that_are_missed_exit_3(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = replace(BUGS[0], name="nothing at all", plant=lambda parts: parts)
    (blind,) = (bug for bug in BUGS if bug.name == "target penalties blind to drafted tokens")
    for bugs, code in (((blind,), 0), ((blind, harmless), 3)):
        monkeypatch.setattr(verdict, "BUGS", bugs)
        answer = tiny.specctl("verify", "--tokens", "600", "--drafter", "distilled", "--planted", "--wide")
        assert answer.code == code, answer.out
        assert blind.name in answer.out and "rows of p wrong" in answer.out
        assert "keeps the target's law" in answer.out
    assert "NOT as it must be: enumeration, sampling law" in answer.out and "NOT every planted bug" in answer.out


@pytest.mark.usefixtures("light")
def test_a_lossy_rule_is_called_lossy_and_exits_3(tiny: Tiny) -> None:
    answer = tiny.specctl("verify", "--tokens", "400", "--drafter", "distilled", "--rule", "typical")
    assert answer.code == 3
    assert "LOSSY" in answer.out and "does NOT keep" in answer.out
    assert "Traceback" not in answer.err


def test_nothing_to_verify_is_one_line(tiny: Tiny) -> None:
    for arguments in (("--drafter", "none"), ("--k", "0")):
        answer = tiny.specctl("verify", *arguments)
        assert answer.code == 2 and "verify needs a drafter" in answer.one_line
    assert "heads" in tiny.specctl("verify", "--drafter", "medusa", "--k", "5").one_line
    assert tiny.specctl("verify", "--tokens", "0").code == 2
