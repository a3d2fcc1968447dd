"""Enumeration, an exact check: every branch of several rounds of the public loop, in float64, on toy models.

Sees any departure of the output law beyond 1e-12: in the rule, the residual, what a drafter declares,
caches and positions (through HISTORY). It runs the code that your pair runs, but not your pair: your
models, dtype and device are for the other parts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specctl.chance import Chance, enumerate_branches
from specctl.decoding import Rule
from specctl.events import Round
from specctl.experiments.verify.subject import Subject
from specctl.experiments.verify.toys import ToyDrafter, ToyTarget, toy
from specctl.sampling import History

TOLERANCE = 1e-12
_PROMPT = (1, 0, 1)

Law = dict[tuple[int, ...], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    target: ToyTarget
    drafter: ToyDrafter
    vocab_size: int
    k: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnumerationFigures:
    """worst: total variation to the target's law, at most, over the cases; case: the one it is of."""

    num_cases: int
    num_branches: int
    worst: float
    case: str

    @property
    def holds(self) -> bool:
        return self.worst <= TOLERANCE


def _cases() -> list[Case]:
    """K = 1..4 over two rounds and more; where K tokens branch too much, at V = 2, or with certain proposals."""
    cases = []
    targets: tuple[ToyTarget, ...] = ("CONST", "MARKOV", "HISTORY")
    for target in targets:
        for k, vocab_size, num_tokens in ((1, 3, 3), (2, 3, 3), (3, 2, 4), (4, 2, 5)):
            case = Case(target=target, drafter="ngram", vocab_size=vocab_size, k=k, num_tokens=num_tokens)
            cases.append(case)
            if (target, k) not in (("CONST", 4), ("HISTORY", 4)):
                cases.append(replace(case, drafter="draft_model"))
            if target == "HISTORY" and k < 4:
                cases.append(replace(case, drafter="medusa", vocab_size=2, num_tokens=k + 1))
    return cases


CASES = _cases()


def enumerate_cases(rule: Rule, cases: Sequence[Case]) -> EnumerationFigures:
    """Hold the loop with this rule to the exact law in every case."""
    worst, at, num_branches = -1.0, "", 0
    for case in cases:
        tested = toy(case.target, case.drafter, vocab_size=case.vocab_size, rule=rule)
        distance, count = distance_to_law(tested, k=case.k, num_tokens=case.num_tokens)
        num_branches += count
        if distance > worst:
            worst, at = distance, f"{case.target}, {case.drafter}, K = {case.k}"
    return EnumerationFigures(num_cases=len(cases), num_branches=num_branches, worst=worst, case=at)


def distance_to_law(tested: Subject, *, k: int, num_tokens: int, prompt: Sequence[int] = _PROMPT) -> tuple[float, int]:
    """Total variation between what the parts emit and the law of the clean target, and the branches walked."""
    found: Law = {}
    count = 0

    def run(chance: Chance) -> tuple[int, ...]:
        events = tested.parts.events(prompt, k=k, chance=chance, num_tokens=num_tokens)
        return tuple(itertools.chain.from_iterable(event.emitted for event in events if isinstance(event, Round)))

    for probability, tokens in enumerate_branches(run):
        found[tokens] = found.get(tokens, 0.0) + probability
        count += 1
    expected = law_of(tested, prompt, num_tokens)
    return sum(abs(found.get(t, 0.0) - expected.get(t, 0.0)) for t in {*found, *expected}) / 2, count


def law_of(tested: Subject, prompt: Sequence[int], num_tokens: int) -> Law:
    """The exact probability of every continuation, from fresh forwards."""
    law: Law = {(): 1.0}
    for _ in range(num_tokens):
        texts = [[*prompt, *tokens] for tokens in law]
        logits = tested.fresh_target(torch.tensor(texts), 1).logits[:, -1]
        law = {
            (*tokens, token_id): probability * p
            for (tokens, probability), text, row in zip(law.items(), texts, logits, strict=True)
            for token_id, p in enumerate(
                tested.clean.law.probs(row, History(token_ids=text, prompt_length=len(prompt))).tolist()
            )
        }
    return law
