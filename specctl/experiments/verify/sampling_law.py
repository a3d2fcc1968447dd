"""Sampling law, a statistical check: did the emitted tokens come from the target's law, whatever drew them?

Each token's probability integral transform u' = F(x - 1) + v p(x), v uniform from a generator of its own,
is uniform and independent of all before it if and only if x has the law p; also by position in the
round, since under both exact rules a position that is reached has the target's law. The transform is
taken in two orders of the vocabulary: by id, and from the likeliest token down. The leak

    lambda = sum (P(S) - 1[x in S]) / sum TV(p, q),   S = {p > q},

is 0 under the target's law and 1 where the draft's is followed; bonus positions, where no q was, are left
out. Sees any bug that moves probability in one of these directions, with the power that it states; cannot
see one that only moves it between tokens of neighbouring rank and id. Knows nothing of caches.

Shapes: N new tokens, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specctl.experiments.verify.recording import Request
from specctl.experiments.verify.statistics import Floats, holm, normal_quantile, two_sided, uniformity

_FEWEST = 50  # values that a test is made of
_POWER = 0.8
_CONFIDENCE = 0.95


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What all requests of a run gave, one entry a request: arrays [N], those of S over drafted positions alone.

    by_id, by_rank: u' in the two orders. positions: in the round, from 0. in_surplus: 1[x in S].
    surplus: P(S). distance: TV(p, q).
    """

    by_id: list[Floats] = field(default_factory=list)
    by_rank: list[Floats] = field(default_factory=list)
    positions: list[Floats] = field(default_factory=list)
    in_surplus: list[Floats] = field(default_factory=list)
    surplus: list[Floats] = field(default_factory=list)
    distance: list[Floats] = field(default_factory=list)


def add_request(evidence: Evidence, request: Request, laws: Tensor, generator: torch.Generator) -> None:
    """Take in one request. laws: the target's at every new token, [N, V]; generator: of the v, on the CPU."""
    x = torch.tensor(request.token_ids[len(request.prompt) :], device=laws.device)[:, None]
    p = laws.double()
    chosen = p.gather(1, x)[:, 0]
    at = torch.arange(p.shape[1], device=p.device)
    before = (p * (at < x)).sum(1)
    likelier = (p > chosen[:, None]) | ((p == chosen[:, None]) & (at < x))
    v = torch.rand((2, len(x)), generator=generator, dtype=torch.float64).to(p.device)
    evidence.by_id.append(_array(before + v[0] * chosen))
    evidence.by_rank.append(_array((p * likelier).sum(1) + v[1] * chosen))
    evidence.positions.append(np.concatenate([np.arange(len(r.emitted), dtype=np.float64) for r in request.rounds]))
    first, rows, q = len(request.prompt), list[int](), []
    for r in request.rounds:
        count = min(len(r.emitted), len(r.q))
        rows += range(r.start - first, r.start - first + count)
        q.append(r.q[:count].double())
    drafted, x = p[rows], x[rows]
    difference = drafted - torch.cat(q)
    in_surplus = difference > 0
    evidence.in_surplus.append(_array(in_surplus.gather(1, x)[:, 0].double()))
    evidence.surplus.append(_array((drafted * in_surplus).sum(1)))
    evidence.distance.append(_array(difference.clamp(min=0).sum(1)))


def _array(values: Tensor) -> Floats:
    return values.cpu().numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One test of the law. adjusted: Holm's p-value, for all tests of the run together."""

    name: str
    num_values: int
    p_value: float
    adjusted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """lambda, its 95 % interval, and the smallest that this run would have alarmed at with a power of 0.8."""

    value: float
    interval: tuple[float, float]
    smallest_seen: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFigures:
    num_tokens: int
    tests: list[Test]
    leak: Leak | None  # None where p and q never differ, or nothing was drafted

    @property
    def p_value(self) -> float:
        """Of all tests together; 1 where the run was too short for any."""
        return min((test.adjusted for test in self.tests), default=1.0)


def judge(evidence: Evidence, false_alarm_rate: float) -> SamplingFigures:
    """All tests, adjusted together; the rate sets what `smallest_seen` means."""
    by_id, by_rank = np.concatenate(evidence.by_id), np.concatenate(evidence.by_rank)
    positions = np.concatenate(evidence.positions)
    raw: list[tuple[str, int, float]] = []
    if len(by_id) >= _FEWEST:
        raw.append(("uniform, by id", len(by_id), uniformity(by_id)))
        raw.append(("uniform, by rank", len(by_rank), uniformity(by_rank)))
    for position in range(int(positions.max()) + 1):
        values = by_rank[positions == position]
        if len(values) >= _FEWEST:
            raw.append((f"uniform at position {position}", len(values), uniformity(values)))
    num_pairs, z = _serial(evidence.by_rank)
    if num_pairs >= _FEWEST:
        raw.append(("serial correlation", num_pairs, two_sided(z)))
    surplus, distance = np.concatenate(evidence.surplus), float(np.concatenate(evidence.distance).sum())
    deficit = surplus - np.concatenate(evidence.in_surplus)
    deviation = float(np.sqrt((surplus * (1 - surplus)).sum()))  # of the sum, under the target's law
    has_leak = len(deficit) >= _FEWEST and distance > 1e-3 * len(deficit) and deviation > 0
    if has_leak:
        raw.append(("leak", len(deficit), two_sided(float(deficit.sum()) / deviation)))
    adjusted = holm([p_value for _, _, p_value in raw])
    tests = [
        Test(name=name, num_values=count, p_value=p_value, adjusted=together)
        for (name, count, p_value), together in zip(raw, adjusted, strict=True)
    ]
    leak = None
    if has_leak:
        leak = _leak(float(deficit.sum()) / distance, deviation / distance, false_alarm_rate / len(raw))
    return SamplingFigures(num_tokens=len(by_id), tests=tests, leak=leak)


def _serial(requests: Sequence[Floats]) -> tuple[int, float]:
    """(pairs, z) of the correlation of neighbours within a request: the products have mean 0 and variance 1/144."""
    products = np.concatenate([(each[:-1] - 0.5) * (each[1:] - 0.5) for each in requests])
    return len(products), float(12 * products.sum() / max(1.0, np.sqrt(len(products))))


def _leak(value: float, deviation: float, rate: float) -> Leak:
    half = normal_quantile((1 + _CONFIDENCE) / 2) * deviation
    smallest = (normal_quantile(1 - rate / 2) + normal_quantile(_POWER)) * deviation
    return Leak(value=value, interval=(value - half, value + half), smallest_seen=smallest)
