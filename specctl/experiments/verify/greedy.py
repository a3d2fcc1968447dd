"""Greedy, a deterministic check: at temperature 0 speculative decoding writes plain decoding's text.

Sees whatever changes a most likely token, for every K, drafter and prompt that it is given. Cannot see
what leaves the largest logit where it is, and so most bugs of sampling. Where two texts part, the gap
between the two tokens under a fresh forward tells a numerical tie from a bug: passes of different width
round differently, and only logits as good as equal can be ordered differently by that.

Shapes: V vocab.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from specctl.chance import SeededChance
from specctl.events import Event, Round
from specctl.experiments.verify.subject import Subject
from specctl.sampling import History, SamplingLaw

_TIE = {torch.float64: 1e-10, torch.float32: 1e-4}  # nats; see `tie_gap`


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token at which two greedy texts part. gap: nats that the likeliest token is ahead of the other one."""

    drafter: str
    k: int
    prompt: int
    position: int
    gap: float
    is_tie: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyFigures:
    num_runs: int
    num_tokens: int
    drafters: list[str]
    differences: list[Difference]

    @property
    def holds(self) -> bool:
        return all(difference.is_tie for difference in self.differences)


def tie_gap(dtype: torch.dtype) -> float:
    """The largest gap of two logits that rounding may close: 1e-4 in float32, 0.1 in half precision."""
    return _TIE.get(dtype, 0.1)


def greedy(
    subjects: Mapping[str, tuple[Subject, Sequence[int]]],
    prompts: Sequence[Sequence[int]],
    *,
    gap: float,
    num_tokens: int,
    on_run: Callable[[], None] = lambda: None,
) -> GreedyFigures:
    """Compare every drafter (its subject, the K to try) with plain decoding on every prompt.

    gap: what counts as a tie, nats.
    """
    num_runs = num_compared = 0
    differences = []
    plain_texts: dict[int, list[int]] = {}
    for name, (tested, ks) in subjects.items():
        cold = _at_temperature_0(tested)
        for index, prompt in enumerate(prompts):
            if index not in plain_texts:
                plain_texts[index] = _text(replace(cold, parts=cold.clean), prompt, 0, num_tokens)
            plain = plain_texts[index]
            for k in ks:
                text = _text(cold, prompt, k, num_tokens)
                num_runs, num_compared = num_runs + 1, num_compared + len(plain)
                if text != plain:
                    differences.append(_first_difference(tested, name, k, index, prompt, plain, text, gap))
                on_run()
    return GreedyFigures(num_runs=num_runs, num_tokens=num_compared, drafters=list(subjects), differences=differences)


def _at_temperature_0(tested: Subject) -> Subject:
    def cold(law: SamplingLaw) -> SamplingLaw:
        return replace(law, temperature=0.0)

    clean, parts = (replace(p, law=cold(p.law), draft_law=cold(p.draft_law)) for p in (tested.clean, tested.parts))
    return replace(tested, clean=clean, parts=parts)


def _text(tested: Subject, prompt: Sequence[int], k: int, num_tokens: int) -> list[int]:
    return list(_tokens(tested.parts.events(prompt, k=k, chance=SeededChance(0), num_tokens=num_tokens)))


def _tokens(events: Iterator[Event]) -> Iterator[int]:
    for event in events:
        if isinstance(event, Round):
            yield from event.emitted


def _first_difference(
    tested: Subject,
    drafter: str,
    k: int,
    index: int,
    prompt: Sequence[int],
    plain: Sequence[int],
    text: Sequence[int],
    gap: float,
) -> Difference:
    position = next(at for at, (a, b) in enumerate(zip(plain, text, strict=True)) if a != b)
    context = [*prompt, *plain[:position]]
    ids = torch.tensor([context], device=tested.clean.device)
    neutral = replace(tested.clean.law, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    logits = tested.fresh_target(ids, 1).logits[0, -1]
    logs = neutral.probs(logits, History(token_ids=context, prompt_length=len(prompt))).log()
    apart = float(logs.max() - torch.minimum(logs[plain[position]], logs[text[position]]))
    return Difference(drafter=drafter, k=k, prompt=index, position=position, gap=apart, is_tie=apart < gap)
