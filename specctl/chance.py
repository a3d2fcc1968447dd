"""Where randomness comes from: seeded in production, walked branch by branch in proofs.

Both kinds answer the same two questions (`successes`, `draw`), so the public decoding loop runs
unchanged under either. The global random state is never read or written.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from specctl import acceptance

Result = TypeVar("Result")

_UNIFORMS_PER_ROUND = 128  # K draws, K tests and a closing draw, for K up to 63
_ROUNDS_PER_BLOCK = 64
_LARGEST_UNIFORM = 1 - 2**-53


class Chance(acceptance.Chance, Protocol):
    """What decoding needs: the rule's two questions, and to be told where a round begins."""

    def begin_round(self, index: int) -> None:
        """Later answers belong to round `index` (from 0)."""


class SeededChance:
    """Uniforms that depend on (seed, request, round) and on nothing else.

    Rounds are rows of a table of float64 uniforms, made a block at a time; within a round the
    questions take them in order. float64, since at V = 150,000 a float32 uniform and cumulative
    sum would be too coarse.
    """

    def __init__(self, seed: int, request: int = 0) -> None:
        self._seed, self._request = seed, request
        self._block_index = -1
        self._block = torch.empty(0)
        self._uniforms = torch.empty(0)
        self._next = 0

    def begin_round(self, index: int) -> None:
        block_index, row = divmod(index, _ROUNDS_PER_BLOCK)
        if block_index != self._block_index:
            text = f"{self._seed}/{self._request}/{block_index}"
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            shape = (_ROUNDS_PER_BLOCK, _UNIFORMS_PER_ROUND)
            self._block = torch.rand(shape, generator=generator, dtype=torch.float64)
            self._block_index = block_index
        self._uniforms = self._block[row]
        self._next = 0

    def uniforms(self, count: int) -> Tensor:
        """The next ones of this round, [count] float64 on the CPU: what as many draws would take."""
        start, self._next = self._next, self._next + count
        if self._next > _UNIFORMS_PER_ROUND:
            raise ValueError(f"a round asked for more than {_UNIFORMS_PER_ROUND} uniforms")
        return self._uniforms[start : self._next]

    def _take(self, count: int, device: torch.device) -> Tensor:
        taken = self.uniforms(count)
        return taken if device.type == "cpu" else taken.to(device, non_blocking=True)

    def successes(self, probs: Tensor) -> Tensor:
        return leading_successes(self._take(len(probs), probs.device), probs)

    def draw(self, weights: Tensor) -> Tensor:
        return inverse_cdf(weights, self._take(1, weights.device))


def leading_successes(uniforms: Tensor, probs: Tensor) -> Tensor:
    """Count the leading positions with u < p, [] int64, for uniforms and probs [K]."""
    return (uniforms < probs).cumprod(0).sum()


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds u times the total, [1] int64.

    weights: [V], non-negative. uniform: [1] float64 in [0, 1]. An id of weight zero is never
    returned, neither at u = 0 nor at u = 1. NaN weights give some id within the vocabulary.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    threshold = uniform.clamp(max=_LARGEST_UNIFORM) * cumulative[-1:]  # rounds to less than the total
    return torch.searchsorted(cumulative[:-1], threshold, right=True)


class ScriptedChance:
    """Answers from a script of branch numbers, then always takes the first possible branch.

    Branches of probability zero are never taken. `trail` records (branch taken, probabilities of
    all branches), from which `enumerate_branches` finds the next script.
    """

    def __init__(self, script: list[int]) -> None:
        self._script = script
        self.trail: list[tuple[int, list[float]]] = []

    def begin_round(self, index: int) -> None:
        pass

    def _branch(self, probs: list[float]) -> int:
        remaining = self._script[len(self.trail) :]
        choice = remaining[0] if remaining else next(i for i, p in enumerate(probs) if p > 0)
        self.trail.append((choice, probs))
        return choice

    def successes(self, probs: Tensor) -> Tensor:
        outcomes, survival = [], 1.0
        for p in probs.clamp(max=1).tolist():
            outcomes.append(survival * (1 - p))
            survival *= p
        return torch.tensor(self._branch([*outcomes, survival]))

    def draw(self, weights: Tensor) -> Tensor:
        return torch.tensor([self._branch((weights / weights.sum()).tolist())])


def enumerate_branches(run: Callable[[Chance], Result]) -> Iterator[tuple[float, Result]]:
    """Every (probability, result) of a randomised `run`, each branch walked once, depth first."""
    script: list[int] | None = []
    while script is not None:
        chance = ScriptedChance(script)
        result = run(chance)
        probability = 1.0
        for choice, probs in chance.trail:
            probability *= probs[choice]
        yield probability, result
        script = _next_script(chance.trail)


def _next_script(trail: list[tuple[int, list[float]]]) -> list[int] | None:
    for depth in reversed(range(len(trail))):
        choice, probs = trail[depth]
        later = next((i for i in range(choice + 1, len(probs)) if probs[i] > 0), None)
        if later is not None:
            return [taken for taken, _ in trail[:depth]] + [later]
    return None
