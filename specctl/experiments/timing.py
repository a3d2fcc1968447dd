"""Times taken apart: one draft step, one target step, a pass over n rows, the rest of a round.

These feed the predicted speedup, which must not use the measurement that it is held against.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from specctl.acceptance import token_rule
from specctl.chance import SeededChance
from specctl.drafters.base import DenseProposal
from specctl.errors import UsageError
from specctl.experiments.pair import Pair
from specctl.sampling import History

_CACHED_TOKENS = 64
_TRIALS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a round is made of, in units of one plain target step (drawing included).

    cost_ratio: one draft step, drawing included. verify_cost: {rows: ratio}. overhead: {K: ratio},
    judging and bringing the verdict to the host.
    """

    target_step_seconds: float
    cost_ratio: float
    verify_cost: dict[int, float]
    overhead: dict[int, float]


def measure_costs(pair: Pair, drafter: str, ks: Iterable[int]) -> Costs:
    """Time the parts of a round, interleaved so that the machine's drift meets all alike; medians.

    ks: at least one K of 1 or more. A draft step is a K-th of drafting the largest K tokens.
    Raises UsageError where a context does not hold the rows of the largest K.
    """
    ks = sorted(k for k in set(ks) if k > 0)
    context, longest = pair.target.context_length, ks[-1]
    cached = min(_CACHED_TOKENS, context - longest - 1)
    if cached < 1:
        raise UsageError(f"K = {longest} does not fit into a context of {context} tokens; lower K")
    parts: dict[object, Callable[[], float]] = {"target": _target_step(pair, cached, draw=True)}
    parts["draft"] = _draft(pair, drafter, cached, longest)
    parts |= {("rows", k + 1): _target_step(pair, cached, rows=k + 1) for k in ks}
    parts |= {("rule", k): _judge(pair, k) for k in ks}
    times: dict[object, list[float]] = {name: [] for name in parts}
    with torch.inference_mode():
        for trial in range(_TRIALS):
            for name, run in parts.items():
                taken = run()
                if trial >= _TRIALS // 4:  # the rest is warm-up
                    times[name].append(taken)
    seconds = {name: median(values) for name, values in times.items()}
    step = seconds["target"]
    return Costs(
        target_step_seconds=step,
        cost_ratio=seconds["draft"] / longest / step,
        verify_cost={1: 1.0} | {k + 1: seconds["rows", k + 1] / step for k in ks},
        overhead={k: seconds["rule", k] / step for k in ks},
    )


def _draft(pair: Pair, name: str, cached: int, k: int) -> Callable[[], float]:
    """Drafting K tokens after `cached` ones; reading those is not timed."""
    drafter, chance, prompt = pair.drafter(name), SeededChance(0), [0] * (cached + 1)
    ids = torch.tensor([prompt[:-1]], device=pair.device)
    forward = pair.target.session().extend(ids, num_logits=1)
    history = History(token_ids=prompt, prompt_length=len(prompt))

    def run() -> float:
        drafter.begin(prompt, forward)
        started = perf_counter()
        chance.begin_round(0)
        drafted = drafter.propose(history, k, pair.law, chance).ids.tolist()
        seconds = perf_counter() - started
        if not drafted:
            raise UsageError(f"{drafter.name} cannot draft after {cached} tokens; its context is too short")
        return seconds

    return run


def _target_step(pair: Pair, cached: int, rows: int = 1, draw: bool = False) -> Callable[[], float]:
    """A pass over `rows` tokens after `cached` ones, its probabilities and, with `draw`, a token on the host."""
    session = pair.target.session()
    session.extend(torch.zeros(1, cached, dtype=torch.int64, device=pair.device))
    ids = torch.zeros(1, rows, dtype=torch.int64, device=pair.device)
    history, chance = History(token_ids=[], prompt_length=0), SeededChance(0)

    def run() -> float:
        started = perf_counter()
        probs = pair.law.probs(session.extend(ids).logits[0], history)
        session.keep((cached,))
        chance.begin_round(0)
        (chance.draw(probs[0]) if draw else probs[:1, :1]).tolist()
        return perf_counter() - started

    return run


def _judge(pair: Pair, k: int) -> Callable[[], float]:
    """The rule on K drafts that agree with the target, to the verdict on the host."""
    vocab_size = pair.target.vocab_size
    p = torch.full((k + 1, vocab_size), 1 / vocab_size, device=pair.device)
    q = torch.cat((p[:-1], torch.zeros_like(p[:1])))
    proposal, chance = DenseProposal(torch.zeros(k, dtype=torch.int64, device=pair.device), q), SeededChance(0)

    def run() -> float:
        started = perf_counter()
        chance.begin_round(0)
        verdict = token_rule(p, proposal, chance)
        torch.cat((verdict.num_accepted.view(1), verdict.closing)).tolist()
        return perf_counter() - started

    return run
