"""The verdict: does this pair keep the target's law, and would the test have seen it if not?

Puts the parts together for a run's pair. Knows nothing of how a verdict is shown.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from specctl.config import RunConfig
from specctl.drafters.draft_model import DraftModel
from specctl.errors import UsageError
from specctl.experiments.pair import Pair
from specctl.experiments.verify.checks import PlantedRow, RunPlan, run_planted, sampled_run
from specctl.experiments.verify.enumeration import CASES, EnumerationFigures, enumerate_cases
from specctl.experiments.verify.greedy import GreedyFigures, greedy, tie_gap
from specctl.experiments.verify.planted import BUGS, ENUMERATION, GREEDY, RESCORE, SAMPLING
from specctl.experiments.verify.rescore import RescoreFigures
from specctl.experiments.verify.sampling_law import SamplingFigures
from specctl.experiments.verify.subject import Parts, Subject, subject, through_module
from specctl.experiments.workload import workload
from specctl.models.backend import NATIVE
from specctl.models.hf import HFModel

NUM_TOKENS = 20_000
FALSE_ALARM_RATE = 1e-3  # of the whole verdict: the other parts do not draw lots
_PLANTED_SHARE = 5  # each bug runs on this part of the tokens
_REQUEST_TOKENS = 128
_GREEDY_PROMPTS = 2
_GREEDY_TOKENS = 32
_LONGEST_GREEDY = 8  # K
_ENUMERATION_SECONDS = 5.0
_TRIAL_TOKENS = 64

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one part found. figures: its values under their own names."""

    part: str
    holds: bool
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """holds: every part does. path: what ran in the kernel, as in any run of the pair. planted: None unless asked
    for; all_caught: each bug as its row says.
    """

    drafter: str
    rule: str
    lossy: bool
    k: int
    temperature: float
    path: str
    holds: bool
    all_caught: bool
    findings: list[Finding]
    planted: list[PlantedRow] | None
    false_alarm_rate: float
    seconds: float
    note: str | None


def check_wanted(config: RunConfig) -> None:
    """Raises UsageError where there is nothing to verify."""
    if config.decoding.drafter == "none" or config.decoding.num_speculative_tokens == 0:
        raise UsageError("verify needs a drafter and decoding.num_speculative_tokens of 1 or more; give --drafter, --k")


def verify(
    pair: Pair,
    *,
    greedy_drafters: Sequence[str],
    num_tokens: int = NUM_TOKENS,
    planted: bool = False,
    narrate: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> Verdict:
    """Verify the run's pair; greedy decoding with each of `greedy_drafters`."""
    started = perf_counter()
    decoding = pair.config.decoding
    check_wanted(pair.config)
    tested = subject_of(pair, decoding.drafter)
    plan = _plan(pair, num_tokens)
    short = _planted_plan(tested, plan)
    others = {name: (subject_of(pair, name), _greedy_ks(pair, name)) for name in greedy_drafters}
    num_greedy = sum(len(ks) for _, ks in others.values()) * _GREEDY_PROMPTS * _GREEDY_TOKENS
    num_planted = len(BUGS) * short.num_tokens if planted else 0
    total = num_tokens + num_greedy + num_planted
    seconds = _ENUMERATION_SECONDS + total * _seconds_per_token(tested, plan)
    narrate(f"verify: {num_tokens:,} sampled tokens and {total - num_tokens:,} others, about {seconds:.0f} s")
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    findings = [_enumeration(enumerate_cases(tested.clean.step_by_step().rule, CASES))]
    rescored, sampling = sampled_run(tested, plan, FALSE_ALARM_RATE, advance)
    findings += [_rescore(rescored), _sampling(sampling)]
    gap = allowed_gap(pair)
    first, on_run = plan.prompts[:_GREEDY_PROMPTS], partial(advance, _GREEDY_TOKENS)
    texts = greedy(others, first, gap=gap, num_tokens=_GREEDY_TOKENS, on_run=on_run)
    findings.append(_greedy(texts))
    rows = None
    if planted:
        rows = run_planted(
            tested,
            short,
            false_alarm_rate=FALSE_ALARM_RATE,
            gap=gap,
            bugs=BUGS,
            on_bug=partial(advance, short.num_tokens),
        )
    return Verdict(
        drafter=decoding.drafter,
        rule=decoding.rule,
        lossy=pair.is_lossy(plan.k),
        k=plan.k,
        temperature=tested.clean.law.temperature,
        path=tested.clean.path,
        holds=all(finding.holds for finding in findings),
        all_caught=all(row.as_expected for row in rows or ()),
        findings=findings,
        planted=rows,
        false_alarm_rate=FALSE_ALARM_RATE,
        seconds=perf_counter() - started,
        note=_note(pair, rescored),
    )


def _dtype(pair: Pair) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, pair.config.runtime.dtype)
    return dtype


def allowed_gap(pair: Pair) -> float:
    """What counts as a tie of greedy tokens, nats; there is none where logits do not depend on the pass."""
    return 0.0 if pair.target.capabilities.same_bits else tie_gap(_dtype(pair))


def subject_of(pair: Pair, name: str) -> Subject:
    """A drafter of the run as a subject. At temperature 0, where there is nothing to draw, the law gets 1."""
    drafter, dtype = pair.drafter(name), _dtype(pair)
    law, draft_law = pair.law, pair.draft_law
    if law.temperature == 0:
        law, draft_law = (replace(each, temperature=each.temperature or 1.0) for each in (law, draft_law))
    exact = dtype in (torch.float32, torch.float64)  # in half precision only the same weights give the same rows
    repeatable = (*NATIVE, HFModel) if exact else (HFModel,)
    fresh_target = fresh_draft = None
    if isinstance(pair.target, repeatable):
        fresh_target = through_module(pair.artefacts.target(), dtype, pair.device, pair.target.vocab_size)
    if isinstance(drafter, DraftModel) and isinstance(drafter.model, repeatable):
        fresh_draft = through_module(pair.artefacts.draft(name), dtype, pair.device, drafter.model.vocab_size)
    parts = Parts(
        target=pair.target,
        drafter=drafter,
        law=law,
        draft_law=draft_law,
        rule=pair.rule,
        device=pair.device,
        draw=pair.draw,
        around=pair.around_passes,
    )
    return subject(parts, fresh_target=fresh_target, fresh_draft=fresh_draft, dtype=dtype)


def _plan(pair: Pair, num_tokens: int) -> RunPlan:
    count = -(-num_tokens // _REQUEST_TOKENS)
    if pair.config.prompts is None:
        prompts = pair.prompts(max(count, _GREEDY_PROMPTS))
    else:
        prompts = [prompt.token_ids for prompt in workload(pair).measured]
    room = pair.target.context_length - max(map(len, prompts))
    return RunPlan(
        prompts=prompts,
        k=pair.config.decoding.num_speculative_tokens,
        seed=pair.config.seed,
        num_tokens=num_tokens,
        request_tokens=max(1, min(_REQUEST_TOKENS, room)),
    )


def _planted_plan(tested: Subject, plan: RunPlan) -> RunPlan:
    """A shorter run, of requests that a draft can read whole where there are such: its q rows are rescored too."""
    drafter, request_tokens = tested.clean.drafter, plan.request_tokens
    if isinstance(drafter, DraftModel):
        room = drafter.model.context_length - max(map(len, plan.prompts))
        request_tokens = min(request_tokens, room) if room > plan.k else request_tokens
    return replace(plan, num_tokens=-(-plan.num_tokens // _PLANTED_SHARE), request_tokens=request_tokens)


def _greedy_ks(pair: Pair, name: str) -> range:
    return range(1, min(_LONGEST_GREEDY, pair.num_heads(name) or _LONGEST_GREEDY) + 1)


def _seconds_per_token(tested: Subject, plan: RunPlan) -> float:
    """Of a few rounds, decoded and checked, after a warm-up of the same."""
    trial = replace(plan, num_tokens=min(_TRIAL_TOKENS, plan.request_tokens))
    started = 0.0
    for _ in range(2):
        started = perf_counter()
        sampled_run(tested, trial, FALSE_ALARM_RATE)
    return (perf_counter() - started) / trial.num_tokens


def _enumeration(figures: EnumerationFigures) -> Finding:
    text = (
        f"{figures.num_branches:,} branches, {figures.num_cases} toy cases: total variation up to {figures.worst:.0e}"
    )
    if not figures.holds:
        text += f" ({figures.case})"
    return Finding(part=ENUMERATION, holds=figures.holds, text=text, figures=asdict(figures))


def _rescore(figures: RescoreFigures) -> Finding:
    text = f"{figures.num_p:,} rows of p within {figures.worst_p:.0e}, "
    text += f"{figures.num_q:,} of q within {figures.worst_q:.0e} (tolerance {figures.tolerance:.0e})"
    if wrong := wrong_words(figures):
        text += f"; {wrong}"
    return Finding(part=RESCORE, holds=figures.holds, text=text, figures=asdict(figures))


def wrong_words(figures: RescoreFigures) -> str:
    """What a rescore found wrong, empty where nothing was."""
    counts = (
        (figures.num_wrong_p, "rows of p wrong"),
        (figures.num_wrong_q, "rows of q wrong"),
        (figures.num_impossible, "tokens of p = 0"),
        (figures.num_short, "rounds of another length than accepted + 1"),
        (figures.num_wrong_closing, "closing tokens that no exact rule gives"),
    )
    words = [f"{count:,} {words}" for count, words in counts if count]
    if figures.is_filtered_otherwise:
        words.append(f"{figures.num_at_edge:,} rows filtered otherwise")
    return ", ".join(words)


def _sampling(figures: SamplingFigures) -> Finding:
    least = min(figures.tests, key=lambda test: test.p_value, default=None)
    text = f"{figures.num_tokens:,} tokens, {len(figures.tests)} tests: p = {figures.p_value:.2g}"
    if least is None:
        text = f"{figures.num_tokens:,} tokens are too few for a test; raise --tokens"
    elif figures.p_value < FALSE_ALARM_RATE:
        text += f" ({least.name})"
    if leak := figures.leak:
        low, high = leak.interval
        text += f"; leak {leak.value:+.3f} ({low:+.3f} to {high:+.3f}), "
        if leak.smallest_seen is None:
            text += "too few tokens to see even a leak of 1; raise --tokens"
        else:
            text += f"seen from {leak.smallest_seen:.3f} on"
    values = {**asdict(figures), "p_value": figures.p_value}
    return Finding(part=SAMPLING, holds=figures.p_value >= FALSE_ALARM_RATE, text=text, figures=values)


def _greedy(figures: GreedyFigures) -> Finding:
    text = f"{figures.num_runs} runs of {', '.join(figures.drafters)} write plain decoding's text"
    if figures.differences:
        worst = max(figures.differences, key=lambda difference: difference.gap)
        ties = sum(difference.is_tie for difference in figures.differences)
        text = f"{len(figures.differences)} of {figures.num_runs} runs part from plain decoding, {ties} at a tie; "
        text += f"{worst.drafter}, K = {worst.k}, token {worst.position}: {worst.gap:.2g} nats apart, "
        text += "a numerical tie" if worst.is_tie else "a bug"
    return Finding(part=GREEDY, holds=figures.holds, text=text, figures=asdict(figures))


def _note(pair: Pair, rescored: RescoreFigures) -> str | None:
    notes = []
    if pair.is_lossy(pair.config.decoding.num_speculative_tokens):
        notes.append("LOSSY: the typical rule has another law than the target's, by design.")
    if pair.config.decoding.temperature == 0:
        notes.append("Temperature 0 is what the greedy part verifies; the others ran at temperature 1.")
    if rescored.num_skipped_q:
        notes.append(f"{rescored.num_skipped_q:,} rows of q come from a window of the draft's context: not rescored.")
    return " ".join(notes) or None
