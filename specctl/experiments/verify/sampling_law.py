"""Sampling law, a statistical check: did the emitted tokens come from the target's law, whatever drew them?

Each token's probability integral transform u' = F(x - 1) + v p(x), v uniform from a generator of its own,
is uniform and independent of all before it if and only if x has the law p; also by position in the
round, since under both exact rules a position that is reached has the target's law. The transform is
taken in two orders of the vocabulary: by id, and from the likeliest token down. The leak

    lambda = sum (P(S) - 1[x in S]) / sum TV(p, q),   S = {p > q},

is 0 under the target's law and 1 where the draft's is followed; bonus positions, where no q was, are left
out. Which contexts a run visits depends on what it drew, so P(S) is random, as is the number of tokens at a
position of the round; the tests of both are martingale bounds (`statistics.py`), which hold for that.

Sees any bug that moves probability in one of these directions, with the power that it states; cannot see one
that only moves it between tokens of neighbouring rank and id. Knows nothing of caches.

Shapes: N new tokens, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.experiments.verify.recording import Request
from specctl.experiments.verify.statistics import (
    Floats,
    event_bets,
    holm,
    most_won,
    normal_quantile,
    p_value_of,
    product_bets,
    stakes,
    uniformity,
)

_FEWEST = 50  # tokens that tests are made of
_THRESHOLDS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # at which uniformity by position is looked at
_POWER = 0.8
_VALUES_AT_ONCE = 2**22  # of float64, several times over: rows of a large vocabulary come in parts
_CONFIDENCE = 0.95
_WIDEST, _STEPS = 64.0, 30  # of an interval, and of a search in it


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What all requests of a run gave, one entry a request: arrays [N]; those of S are 0 where nothing was drafted.

    num_positions: K + 1, of a round. by_id, by_rank: u' in the two orders. positions: in the round, from 0.
    in_surplus: 1[x in S]. surplus: P(S). distance: TV(p, q).
    """

    num_positions: int = 1
    by_id: list[Floats] = field(default_factory=list)
    by_rank: list[Floats] = field(default_factory=list)
    positions: list[Floats] = field(default_factory=list)
    in_surplus: list[Floats] = field(default_factory=list)
    surplus: list[Floats] = field(default_factory=list)
    distance: list[Floats] = field(default_factory=list)


def add_request(evidence: Evidence, request: Request, laws: Tensor, generator: torch.Generator) -> None:
    """Take in one request. laws: the target's at every new token, [N, V]; generator: of the v, on the CPU."""
    x = torch.tensor(request.token_ids[len(request.prompt) :], device=laws.device)[:, None]
    v = torch.rand((2, len(x)), generator=generator, dtype=torch.float64).to(laws.device)
    first, q = len(request.prompt), dict[int, Tensor]()  # by the row of the law that it stood against
    for r in request.rounds:
        q |= dict(enumerate(r.q[: len(r.emitted)], start=r.start - first))
    size = max(1, _VALUES_AT_ONCE // laws.shape[1])
    parts = [
        _transformed(laws[begin : begin + size], x[begin : begin + size], v[:, begin : begin + size], q, begin)
        for begin in range(0, len(x), size)
    ]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    names = (evidence.by_id, evidence.by_rank, evidence.in_surplus, evidence.surplus, evidence.distance)
    for values, column in zip(names, columns, strict=True):
        values.append(_array(column))
    evidence.positions.append(np.concatenate([np.arange(len(r.emitted), dtype=np.float64) for r in request.rounds]))


def _transformed(laws: Tensor, x: Tensor, v: Tensor, q: dict[int, Tensor], begin: int) -> tuple[Tensor, ...]:
    """What `Evidence` holds of some rows [n, V], the first of which is row `begin`: five of [n].

    x: [n, 1] tokens. v: [2, n]. q: rows of the draft, by the number of the row.
    """
    p = laws.double()
    chosen = p.gather(1, x)[:, 0]
    at = torch.arange(p.shape[1], device=p.device)
    before = (p * (at < x)).sum(1)
    likelier = (p > chosen[:, None]) | ((p == chosen[:, None]) & (at < x))
    by_rank = (p * likelier).sum(1) + v[1] * chosen
    difference = torch.zeros_like(p)
    for row in range(len(p)):
        if begin + row in q:
            difference[row] = p[row] - q[begin + row].double()
    in_surplus = difference > 0
    return (
        before + v[0] * chosen,
        by_rank,
        in_surplus.gather(1, x)[:, 0].double(),
        (p * in_surplus).sum(1).clamp(max=1),
        difference.clamp(min=0).sum(1),
    )


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
    """lambda, and the values of it that the same bound does not refuse with a confidence of 95 %.

    smallest_seen: the smallest that this run would have alarmed at with a power of 0.8, all tests adjusted for; None
    where even a draft that is always followed would be missed.
    """

    value: float
    interval: tuple[float, float]
    smallest_seen: float | None


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
    """All tests, adjusted together. The rate sets what `smallest_seen` means and how bets are laid, no p-value's truth.

    Which tests there are is decided by the run's plan alone: one that was left out for what it saw would have to be
    adjusted for too.
    """
    by_id, by_rank = np.concatenate(evidence.by_id), np.concatenate(evidence.by_rank)
    if len(by_id) < _FEWEST:
        return SamplingFigures(num_tokens=len(by_id), tests=[], leak=None)
    positions = np.concatenate(evidence.positions)
    rate = false_alarm_rate / (5 + evidence.num_positions)  # of one test
    raw = [
        ("uniform, by id", len(by_id), uniformity(by_id)),
        ("uniform, by rank", len(by_rank), uniformity(by_rank)),
    ]
    for position in range(evidence.num_positions):
        here = positions == position
        raw.append((f"uniform at position {position}", int(here.sum()), _uniform_where(here, by_rank, rate)))
    raw.append(("serial correlation, by id", *_serial(evidence.by_id, rate)))
    raw.append(("serial correlation, by rank", *_serial(evidence.by_rank, rate)))
    surplus, in_surplus = np.concatenate(evidence.surplus), np.concatenate(evidence.in_surplus)
    distance = np.concatenate(evidence.distance)
    leak = _LeakTest(surplus=surplus, in_surplus=in_surplus, distance=distance)
    raw.append(("leak", int((distance > 0).sum()), leak.p_value(rate)))
    assert len(raw) == 5 + evidence.num_positions
    adjusted = holm([p_value for _, _, p_value in raw])
    tests = [
        Test(name=name, num_values=count, p_value=p_value, adjusted=together)
        for (name, count, p_value), together in zip(raw, adjusted, strict=True)
    ]
    return SamplingFigures(num_tokens=len(by_id), tests=tests, leak=leak.figures(rate))


def _uniform_where(here: NDArray[np.bool_], values: Floats, rate: float) -> float:
    """P-value of uniformity of the values at some places, whose number is random: bets on those below thresholds."""
    chosen, bets = values[here], []
    for threshold in _THRESHOLDS:
        stake = stakes(here * np.float64(threshold * (1 - threshold)), rate / (2 * len(_THRESHOLDS)))[here]
        probability, below = np.full(len(chosen), threshold), (chosen < threshold).astype(np.float64)
        bets += [event_bets(probability, below, sign * stake) for sign in (1, -1)]
    return p_value_of(bets)


def _serial(requests: Sequence[Floats], rate: float) -> tuple[int, float]:
    """(pairs, p-value) of the correlation of neighbours in a request: products of mean 0 and variance 1/144."""
    first, second = (np.concatenate([each[of] - 0.5 for each in requests]) for of in (slice(-1), slice(1, None)))
    if not len(first):
        return 0, 1.0
    stake = float(np.sqrt(288 * np.log(2 / rate) / len(first)))
    bets = [product_bets(first, second, sign * stake) for sign in (1, -1)]
    return len(first), p_value_of(bets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LeakTest:
    """Arrays [N] as those of `Evidence`. Under a leak lambda, x is in S with probability P(S) - lambda TV(p, q)."""

    surplus: Floats
    in_surplus: Floats
    distance: Floats

    def _stakes(self, rate: float) -> Floats:
        return stakes(self.surplus * (1 - self.surplus), rate / 2)

    def _bets(self, value: float, stake: Floats) -> Floats:
        """Against a leak of this value."""
        return event_bets(np.clip(self.surplus - value * self.distance, 0, 1), self.in_surplus, stake)

    def p_value(self, rate: float) -> float:
        stake = self._stakes(rate)
        return p_value_of([self._bets(0, stake), self._bets(0, -stake)])

    def figures(self, rate: float) -> Leak | None:
        distance = float(self.distance.sum())
        if distance <= 1e-3 * max(1, int((self.distance > 0).sum())):
            return None
        value = float((self.surplus - self.in_surplus).sum()) / distance
        return Leak(value=value, interval=self._interval(), smallest_seen=self._smallest_seen(rate))

    def _interval(self) -> tuple[float, float]:
        """Bets that fewer are in S refute the smaller leaks, the others the larger ones."""
        stake = self._stakes(1 - _CONFIDENCE)
        limit = float(np.log(2 / (1 - _CONFIDENCE)))
        low = _last(lambda leak: most_won(self._bets(leak, -stake)) >= limit, -_WIDEST, _WIDEST)
        high = _last(lambda leak: most_won(self._bets(leak, stake)) < limit, -_WIDEST, _WIDEST)
        return low, high

    def _smallest_seen(self, rate: float) -> float | None:
        """From the mean and the variance of what the bet wins under a leak, as if that were normal."""
        stake = self._stakes(rate)
        needed = float(np.log(2 / rate) + np.log1p(self.surplus * np.expm1(-stake)).sum())

        def is_missed(leak: float) -> bool:
            chance = np.clip(self.surplus - leak * self.distance, 0, 1)
            mean, variance = -(stake * chance).sum(), (stake**2 * chance * (1 - chance)).sum()
            return float(mean - normal_quantile(_POWER) * np.sqrt(variance)) < needed

        return None if is_missed(1.0) else _last(is_missed, 0.0, 1.0)


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where a condition that holds from `low` on ends, by bisection."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high
