"""Times taken apart: one draft step, a target pass over n rows, and whole rounds of the decoding loop.

These feed the predicted speedup, which must not use the measurement that it is held against: all of
them are taken on a made-up prompt, as long as those that are measured.

Shapes: N trials, R resamples.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice
from statistics import mean, median
from time import perf_counter
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.acceptance import Proposal, Verdict
from specctl.chance import Chance, SeededChance
from specctl.errors import UsageError
from specctl.events import Round
from specctl.experiments.intervals import Floats
from specctl.experiments.pair import Pair
from specctl.sampling import History
from specctl.stopping import StopRules

_CACHED_TOKENS = 64
_TRIALS = 12  # where nothing is measured beside them
_TRIALS_BEFORE, _BLOCKS_A_TRIAL = 2, 6  # where something is: before it, and then one after so many blocks
_ROUNDS = 32  # of a trial, after the first ones
_OPENING = 4  # rounds right after a prompt, which are slower than all others
_PASSES = 8  # of a trial, for what is no round

PLAIN, EMPTY, DRAFT = "plain", "empty", "draft"
Part = str | tuple[str, int]  # the three; ("rows", n) of a target pass; ("round", K); ("opening", K) beside each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Costs:
    """What a round is made of, in units of one plain step: a target pass over one row, its probabilities, its draw.

    cost_ratio: one draft step, drawing included. verify_cost: {rows: ratio}. overhead: {K: ratio}, what a round of
    the decoding loop takes beyond K draft steps and its verifying pass.
    plain_seconds: [N], of a plain step in each trial. round_seconds: {K: [N]}, of a round that drafts K tokens; for
    K = 0 one in which a drafter was asked for some and proposed none. plain_opening, round_opening: [N], what the
    first rounds of a request of plain decoding take beyond that, and those of one that drafts K tokens.
    """

    target_step_seconds: float
    cost_ratio: float
    verify_cost: dict[int, float]
    overhead: dict[int, float]
    plain_seconds: Floats
    round_seconds: dict[int, Floats]
    plain_opening: float = 0.0
    round_opening: dict[int, float] = field(default_factory=dict)

    @property
    def num_trials(self) -> int:
        return len(self.plain_seconds)

    @overload
    def round_cost(self, num_drafted: int) -> float: ...

    @overload
    def round_cost(self, num_drafted: int, trials: NDArray[np.int64]) -> Floats: ...

    def round_cost(self, num_drafted: int, trials: NDArray[np.int64] | None = None) -> float | Floats:
        """Of a round that drafts so many tokens; between two that were timed on the line from one to the other.

        trials: [R, N], those to take instead of all, R times; the cost is then [R].
        """
        if trials is None:
            return float(self.round_cost(num_drafted, np.arange(self.num_trials)[None])[0])
        below = max(size for size in self.round_seconds if size <= num_drafted)
        above = min((size for size in self.round_seconds if size >= num_drafted), default=below)
        # The median of ratios: what moves the machine's speed from trial to trial moves both sides of one alike.
        ratios = (self.round_seconds[size] / self.plain_seconds for size in (below, above))
        low, high = (np.median(ratio[trials], 1) for ratio in ratios)
        share = (num_drafted - below) / (above - below) if above > below else 0.0
        cost: Floats = low + share * (high - low)
        return cost


class CostTimer:
    """Times every part once a trial, in an order shuffled anew, so that the machine's drift meets all alike.

    Trials may be taken at any time, between measurements too; `costs` is made of all of them.
    """

    def __init__(self, pair: Pair, drafter: str, ks: Iterable[int], cached: int = _CACHED_TOKENS) -> None:
        """ks: at least one K of 1 or more. cached: tokens before each part, as far as the context has room.

        Raises UsageError where a context does not hold the rows of the largest K.
        """
        self._pair, self._ks = pair, sorted(k for k in set(ks) if k > 0)
        context, longest = pair.target.context_length, self._ks[-1]
        rounds = max(1, min(_ROUNDS, (context - longest) // 2 - 2 - _OPENING))
        cached = min(cached, context - longest - rounds - _OPENING - 1)
        if cached < 1:
            raise UsageError(f"K = {longest} does not fit into a context of {context} tokens; lower K")
        prompt = _made_up(pair, cached + 1, longest)
        self._parts: dict[Part, Callable[[], dict[Part, float]]] = {DRAFT: _draft(pair, drafter, prompt, longest)}
        self._parts[PLAIN] = partial(_rounds, PLAIN, pair, "none", prompt, 0, rounds)
        self._parts[EMPTY] = partial(_rounds, EMPTY, pair, drafter, prompt, 0, rounds)
        self._parts |= {("rows", n): _target_pass(pair, cached, n) for n in (1, *(k + 1 for k in self._ks))}
        self._parts |= {
            ("round", k): partial(_rounds, ("round", k), pair, drafter, prompt, k, rounds) for k in self._ks
        }
        self._shuffled = random.Random(pair.config.seed)
        self._times: dict[Part, list[float]] = {part: [] for part in self._run()}  # which warms up, too

    def trial(self) -> None:
        """Time every part once more."""
        for part, seconds in self._run().items():
            self._times[part].append(seconds)

    @torch.inference_mode()
    def _run(self) -> dict[Part, float]:
        order = [*self._parts, PLAIN]  # twice: everything is held against it
        self._shuffled.shuffle(order)
        found: dict[Part, list[float]] = {}
        with self._pair.around_passes():
            for part in order:
                for name, seconds in self._parts[part]().items():
                    found.setdefault(name, []).append(seconds)
        return {name: mean(seconds) for name, seconds in found.items()}

    def costs(self) -> Costs:
        return costs_of(self._times, self._ks)


def measure_costs(pair: Pair, drafter: str, ks: Iterable[int]) -> Costs:
    """Time the parts of a round, and nothing else beside them. Raises as `CostTimer` does."""
    timer = CostTimer(pair, drafter, ks)
    for _ in range(_TRIALS):
        timer.trial()
    return timer.costs()


def interleaved(timers: Sequence[CostTimer]) -> Callable[[], None]:
    """Take some trials now; what comes back is to be called between blocks of a measurement, and takes the others."""
    for timer in timers:
        for _ in range(_TRIALS_BEFORE):
            timer.trial()
    num_blocks = 0

    def between() -> None:
        nonlocal num_blocks
        num_blocks += 1
        if num_blocks % _BLOCKS_A_TRIAL == 0:
            for timer in timers:
                timer.trial()

    return between


def costs_of(times: Mapping[Part, Sequence[float]], ks: Sequence[int]) -> Costs:
    """Costs from the seconds of each part, trial by trial.

    Parts that run alone find their weights in the processor's caches and their branches foreseen; in a round they
    do not. So whole rounds are what counts, and the overhead is what the parts do not explain. A pass over more
    rows does all that one over fewer does, so where noise says that it is cheaper, it is as dear.
    """

    def ratio(part: Part, over: Part = PLAIN) -> float:
        return median(a / b for a, b in zip(times[part], times[over], strict=True))

    step, cost_ratio = median(times[PLAIN]), ratio(DRAFT)
    rows = [1, *(k + 1 for k in ks)]
    ratios = accumulate((ratio(("rows", n), ("rows", 1)) for n in rows), max)
    verify_cost = dict(zip(rows, ratios, strict=True))
    rounds = {0: np.array(times[EMPTY])} | {k: np.array(times["round", k]) for k in ks}
    return Costs(
        target_step_seconds=step,
        cost_ratio=cost_ratio,
        verify_cost=verify_cost,
        overhead={k: ratio(("round", k)) - k * cost_ratio - verify_cost[k + 1] for k in ks},
        plain_seconds=np.array(times[PLAIN]),
        round_seconds=rounds,
        plain_opening=median(times.get(("opening", -1), [0.0])) / step,
        round_opening={k: median(times.get(("opening", k), [0.0])) / step for k in rounds},
    )


def _draft(pair: Pair, name: str, prompt: list[int], k: int) -> Callable[[], dict[Part, float]]:
    """Seconds of a draft step: drafting K tokens, by the token; reading the prompt is not timed."""
    drafter, chance = pair.drafter(name), SeededChance(0)
    ids = torch.tensor([prompt[:-1]], device=pair.device)
    forward = pair.target.session().extend(ids, num_logits=1)
    history = History(token_ids=prompt, prompt_length=len(prompt))

    def step() -> float:
        drafter.begin(prompt, forward)
        started = perf_counter()
        chance.begin_round(0)
        drafted = drafter.propose(history, k, pair.draft_law, chance).ids.tolist()
        seconds = perf_counter() - started
        if not drafted:
            raise UsageError(f"{drafter.name} cannot draft after {len(prompt)} tokens; its context is too short")
        return seconds / len(drafted)

    return lambda: {DRAFT: median(step() for _ in range(_PASSES))}


def _made_up(pair: Pair, length: int, longest: int) -> list[int]:
    """A text that repeats itself, so that prompt lookup finds `longest` tokens to propose in it too."""
    period = min(longest + 1, pair.target.vocab_size)
    return [place % period for place in range(length)]


def _target_pass(pair: Pair, cached: int, rows: int) -> Callable[[], dict[Part, float]]:
    """Seconds of a pass over `rows` tokens after `cached` ones and its probabilities."""
    session = pair.target.session()
    session.extend(torch.zeros(1, cached, dtype=torch.int64, device=pair.device), num_logits=1)
    ids = torch.zeros(1, rows, dtype=torch.int64, device=pair.device)
    history = History(token_ids=[], prompt_length=0)

    def once() -> float:
        started = perf_counter()
        probs = pair.law.probs(session.extend(ids).logits[0], history)
        session.keep((cached,))
        probs[:1, :1].tolist()
        return perf_counter() - started

    return lambda: {("rows", rows): median(once() for _ in range(_PASSES))}


def _rounds(part: Part, pair: Pair, drafter: str, prompt: list[int], k: int, count: int) -> dict[Part, float]:
    """Seconds of a round of the public loop that drafts K tokens, whatever they are worth: the mean of `count`.

    The first rounds of the request are left out, and what they take beyond that comes beside it. K = 0: a plain step
    for the drafter "none", else a round for which the drafter is asked for no tokens.
    """
    stop = StopRules(max_new_tokens=_OPENING + count + k)

    def reject_all(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
        """Judge as ever, then keep nothing and close with the first draft: every round is like the one before."""
        verdict = pair.rule(p, proposal, chance)
        return Verdict(torch.zeros_like(verdict.num_accepted), proposal.ids[:1], verdict.health)

    loop = pair.plain if drafter == "none" else partial(pair.speculative, drafter=drafter, k=k, rule=reject_all)
    events = islice(loop(prompt, stop=stop), _OPENING + count)
    seconds = [event.seconds for event in events if isinstance(event, Round)]
    steady = mean(seconds[_OPENING:])
    opening: Part = ("opening", -1 if part == PLAIN else k)
    return {part: steady, opening: sum(seconds[:_OPENING]) - _OPENING * steady}
