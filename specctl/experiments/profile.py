"""Where the time of a round goes, beside what it takes to read the weights once.

With a few rows a pass cannot be faster than its weights can be read, so that is the limit of a draft step
and of a verifying pass. Reading is timed right after, with the same threads. Values only; nothing is printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from specctl.drafters.draft_model import DraftModel
from specctl.events import Round
from specctl.experiments.pair import Pair
from specctl.models.backend import NATIVE
from specctl.models.session import CausalModel

_TRIALS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """seconds: the median over rounds. limit_seconds: of reading the weights that it needs, None for none."""

    name: str
    seconds: float
    limit_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Of the rounds that drafted `k` tokens (0 in plain decoding), the first left out."""

    k: int
    num_rounds: int
    tokens_per_round: float
    parts: list[Part]

    @property
    def whole(self) -> Part:
        limits = [part.limit_seconds for part in self.parts if part.limit_seconds]
        return Part(
            name="whole",
            seconds=sum(part.seconds for part in self.parts),
            limit_seconds=sum(limits) if limits else None,
        )


def profile(pair: Pair, drafter: str, k: int, rounds: Sequence[Round]) -> Profile | None:
    """Take apart rounds that just happened; None where too few drafted all of K."""
    full = [event for event in rounds[1:] if len(event.drafted) == k]
    if not full:
        return None
    draft, verify, accept = (
        median(getattr(event, name) for event in full) for name in ("draft_seconds", "verify_seconds", "accept_seconds")
    )
    rest = [event.seconds - event.draft_seconds - event.verify_seconds - event.accept_seconds for event in full]
    parts = [Part(name="verify" if k else "target", seconds=verify, limit_seconds=_reading(pair.target))]
    if k:
        proposer = pair.drafter(drafter)
        reading = _reading(proposer.model) if isinstance(proposer, DraftModel) else None
        parts = [
            Part(name=f"draft, {k} tokens", seconds=draft, limit_seconds=None if reading is None else k * reading),
            *parts,
            Part(name="accept", seconds=accept),
            Part(name="bookkeeping", seconds=median(rest)),
        ]
    return Profile(
        k=k,
        num_rounds=len(full),
        tokens_per_round=sum(len(event.emitted) for event in full) / len(full),
        parts=parts,
    )


def _reading(model: CausalModel) -> float | None:
    """Seconds of summing as many bytes as a pass of the model reads."""
    if not isinstance(model, NATIVE):
        return None
    if model.threads is not None:
        torch.set_num_threads(model.threads)
    buffer = torch.ones(model.pass_bytes // 4, device=model.device)
    times = []
    for _ in range(_TRIALS):
        started = perf_counter()
        buffer.sum().item()
        times.append(perf_counter() - started)
    return median(times[_TRIALS // 4 :])
