"""The parts of a verdict that run on the user's own pair, and the planted bugs under all parts.

Values in, values out; what each part sees is said in its own file.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from specctl.experiments.verify.enumeration import TOLERANCE, distance_to_law
from specctl.experiments.verify.greedy import GreedyFigures, greedy
from specctl.experiments.verify.planted import ENUMERATION, GREEDY, RESCORE, SAMPLING, Bug
from specctl.experiments.verify.recording import record
from specctl.experiments.verify.rescore import RescoreFigures, rescore
from specctl.experiments.verify.sampling_law import Evidence, SamplingFigures, add_request, judge
from specctl.experiments.verify.subject import Subject
from specctl.experiments.verify.toys import toy

_TOY_K, _TOY_TOKENS = 2, 3
_GREEDY_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A sampled run: requests over the prompts in turn until there are `num_tokens` new tokens.

    request_tokens: the most of one request. seed: of the draws, and of the transform's v.
    """

    prompts: Sequence[Sequence[int]]
    k: int
    seed: int
    num_tokens: int
    request_tokens: int

    def requests(self) -> Iterator[tuple[int, Sequence[int], int]]:
        """(number, prompt, tokens); the last may be shorter."""
        left, number = self.num_tokens, 0
        while left > 0:
            tokens = min(left, self.request_tokens)
            yield number, self.prompts[number % len(self.prompts)], tokens
            left, number = left - tokens, number + 1


def sampled_run(
    tested: Subject, plan: RunPlan, false_alarm_rate: float, on_tokens: Callable[[int], None] = lambda count: None
) -> tuple[RescoreFigures, SamplingFigures]:
    """Decode the plan's requests, and rescore and judge the same tokens."""
    figures, evidence = RescoreFigures(tolerance=tested.tolerance), Evidence(num_positions=plan.k + 1)
    generator = torch.Generator().manual_seed(plan.seed + 1)
    for number, prompt, num_tokens in plan.requests():
        request = record(tested.parts, prompt, k=plan.k, seed=plan.seed, request=number, num_tokens=num_tokens)
        add_request(evidence, request, rescore(tested, request, figures), generator)
        on_tokens(request.num_new_tokens)
    return figures, judge(evidence, false_alarm_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedRow:
    """One bug. missing: what the pair lacks for it to exist, and then nothing else is known.

    path: what of it ran in the kernel. must, caught: parts that have to see it, and that did. as_expected: `caught`
    holds all of `must`, and a
    bug that keeps the law was seen by none of the parts that look at the law alone.
    """

    name: str
    keeps_law: bool
    must: tuple[str, ...]
    path: str = "-"
    missing: str | None = None
    total_variation: float | None = None
    rescore: RescoreFigures | None = None
    sampling: SamplingFigures | None = None
    greedy: GreedyFigures | None = None
    caught: tuple[str, ...] = ()
    as_expected: bool = True


def run_planted(
    tested: Subject,
    plan: RunPlan,
    *,
    false_alarm_rate: float,
    gap: float,
    bugs: Sequence[Bug],
    on_bug: Callable[[], None] = lambda: None,
) -> list[PlantedRow]:
    """Every bug on the subject, and on its toy, if it has one, under enumeration. gap: as in `greedy`."""
    rows = []
    for bug in bugs:
        rows.append(_row(bug, tested, plan, false_alarm_rate, gap))
        on_bug()
    return rows


def _row(bug: Bug, tested: Subject, plan: RunPlan, false_alarm_rate: float, gap: float) -> PlantedRow:
    missing = bug.needs(tested) or (f"K of {bug.least_k} or more" if plan.k < bug.least_k else None)
    if missing:
        return PlantedRow(name=bug.name, keeps_law=bug.keeps_law, must=bug.caught_by, missing=missing)
    total_variation = None
    if bug.toy is not None:
        small = bug.planted_in(toy(bug.toy, rule=tested.clean.step_by_step().rule))
        total_variation, _ = distance_to_law(small, k=_TOY_K, num_tokens=_TOY_TOKENS)
    sick = bug.planted_in(tested)
    figures, sampling = sampled_run(sick, plan, false_alarm_rate)
    texts = greedy({"": (sick, (plan.k,))}, plan.prompts[:2], gap=gap, num_tokens=_GREEDY_TOKENS)
    seen = {
        ENUMERATION: total_variation is not None and total_variation > TOLERANCE,
        RESCORE: not figures.holds,
        SAMPLING: sampling.p_value < false_alarm_rate,
        GREEDY: not texts.holds,
    }
    caught = tuple(part for part, found in seen.items() if found)
    innocent = not (bug.keeps_law and (seen[ENUMERATION] or seen[SAMPLING] or seen[GREEDY]))
    return PlantedRow(
        name=bug.name,
        keeps_law=bug.keeps_law,
        must=bug.caught_by,
        path=sick.clean.path,
        total_variation=total_variation,
        rescore=figures,
        sampling=sampling,
        greedy=texts,
        caught=caught,
        as_expected=innocent and set(bug.caught_by) <= set(caught),
    )
