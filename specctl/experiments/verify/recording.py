"""What a run really used: every row of p and q, and every verdict.

A `Recorder` is an observer of the decoding loop, so rows are recorded as they were used, right or wrong.
Knows nothing of what they ought to be.

Shapes: K drafted, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.acceptance import Proposal, Verdict
from specctl.chance import SeededChance
from specctl.events import Round
from specctl.experiments.verify.subject import Parts


class Recorder:
    """An observer that keeps every round: p, what was drafted, what was decided."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Proposal, Verdict]] = []

    def __call__(self, p: Tensor, proposal: Proposal, verdict: Verdict) -> None:
        self.seen.append((p, proposal, verdict))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundRecord:
    """One round. start: tokens committed before it. num_accepted: as the rule decided, before any stop.

    p: [K + 1, V]. q: [K, V]. emitted may be cut by the budget.
    """

    start: int
    drafted: list[int]
    num_accepted: int
    closing: int
    emitted: tuple[int, ...]
    p: Tensor
    q: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One request: its prompt, all its tokens (the prompt's first), and its rounds."""

    prompt: list[int]
    token_ids: list[int]
    rounds: list[RoundRecord]

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt)


def record(parts: Parts, prompt: Sequence[int], *, k: int, seed: int, request: int, num_tokens: int) -> Request:
    """Decode one request through `speculative()`, observed."""
    recorder = Recorder()
    events = parts.events(prompt, k=k, chance=SeededChance(seed, request), num_tokens=num_tokens, observer=recorder)
    rounds = [event for event in events if isinstance(event, Round)]
    token_ids, records = list(prompt), []
    for round_, (p, proposal, verdict) in zip(rounds, recorder.seen, strict=True):
        positions = torch.arange(len(proposal.ids), device=p.device)
        rows = [proposal.row(position) for position in positions]
        records.append(
            RoundRecord(
                start=len(token_ids),
                drafted=list(round_.drafted),
                num_accepted=int(verdict.num_accepted),
                closing=int(verdict.closing),
                emitted=round_.emitted,
                p=p,
                q=torch.stack(rows).to(p.dtype) if rows else p.new_zeros((0, p.shape[1])),
            )
        )
        token_ids += round_.emitted
    return Request(prompt=list(prompt), token_ids=token_ids, rounds=records)
