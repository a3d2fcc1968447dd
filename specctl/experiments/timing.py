"""Times taken apart: one draft step, one target step, a pass over n rows, and a whole round.

These feed the predicted speedup, which must not use the measurement that it is held against: all of
them are taken on a made-up prompt.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from specctl.acceptance import Proposal, Verdict
from specctl.chance import Chance, SeededChance
from specctl.errors import UsageError
from specctl.events import Round
from specctl.experiments.pair import Pair
from specctl.sampling import History
from specctl.stopping import StopRules

_CACHED_TOKENS = 64
_TRIALS = 20
_ROUNDS = 3  # timed in a request, after a first one


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a round is made of, in units of one plain target step (drawing included).

    cost_ratio: one draft step, drawing included. verify_cost: {rows: ratio}. overhead: {K: ratio}, what
    a round of the decoding loop takes beyond K draft steps and its verifying pass.
    """

    target_step_seconds: float
    cost_ratio: float
    verify_cost: dict[int, float]
    overhead: dict[int, float]


def measure_costs(pair: Pair, drafter: str, ks: Iterable[int]) -> Costs:
    """Time the parts of a round, interleaved so that the machine's drift meets all alike; medians.

    ks: at least one K of 1 or more. A draft step is a K-th of drafting the largest K tokens. Parts that
    run alone find their weights in the processor's caches and their branches foreseen; in a round they
    do not. So whole rounds are timed as well, and the overhead is what the parts do not explain.
    Raises UsageError where a context does not hold the rows of the largest K.
    """
    ks = sorted(k for k in set(ks) if k > 0)
    context, longest = pair.target.context_length, ks[-1]
    cached = min(_CACHED_TOKENS, context - longest - _ROUNDS - 2)
    if cached < 1:
        raise UsageError(f"K = {longest} does not fit into a context of {context} tokens; lower K")
    parts: dict[object, Callable[[], list[float]]] = {"target": _target_step(pair, cached, draw=True)}
    parts["draft"] = _draft(pair, drafter, cached, longest)
    parts |= {("rows", k + 1): _target_step(pair, cached, rows=k + 1) for k in ks}
    parts |= {("round", k): _rounds(pair, drafter, cached, k, longest) for k in (0, *ks)}
    times: dict[object, list[float]] = {name: [] for name in parts}
    with torch.inference_mode():
        for trial in range(_TRIALS):
            for name, run in parts.items():
                taken = run()
                if trial >= _TRIALS // 4:  # the rest is warm-up
                    times[name] += taken
    seconds = {name: median(values) for name, values in times.items()}
    step = seconds["target"]
    cost_ratio = seconds["draft"] / step
    verify_cost = {1: 1.0} | {k + 1: seconds["rows", k + 1] / step for k in ks}
    return Costs(
        target_step_seconds=step,
        cost_ratio=cost_ratio,
        verify_cost=verify_cost,
        overhead={k: seconds["round", k] / seconds["round", 0] - k * cost_ratio - verify_cost[k + 1] for k in ks},
    )


def _draft(pair: Pair, name: str, cached: int, k: int) -> Callable[[], list[float]]:
    """Drafting K tokens after `cached` ones, by the token; reading those is not timed."""
    drafter, chance, prompt = pair.drafter(name), SeededChance(0), _made_up(pair, cached + 1, k)
    ids = torch.tensor([prompt[:-1]], device=pair.device)
    forward = pair.target.session().extend(ids, num_logits=1)
    history = History(token_ids=prompt, prompt_length=len(prompt))

    def run() -> list[float]:
        drafter.begin(prompt, forward)
        started = perf_counter()
        chance.begin_round(0)
        drafted = drafter.propose(history, k, pair.draft_law, chance).ids.tolist()
        seconds = perf_counter() - started
        if not drafted:
            raise UsageError(f"{drafter.name} cannot draft after {cached} tokens; its context is too short")
        return [seconds / len(drafted)]

    return run


def _made_up(pair: Pair, length: int, longest: int) -> list[int]:
    """A text that repeats itself, so that prompt lookup finds `longest` tokens to propose in it too."""
    period = min(longest + 1, pair.target.vocab_size)
    return [place % period for place in range(length)]


def _target_step(pair: Pair, cached: int, rows: int = 1, draw: bool = False) -> Callable[[], list[float]]:
    """A pass over `rows` tokens after `cached` ones, its probabilities and, with `draw`, a token on the host."""
    session = pair.target.session()
    session.extend(torch.zeros(1, cached, dtype=torch.int64, device=pair.device))
    ids = torch.zeros(1, rows, dtype=torch.int64, device=pair.device)
    history, chance = History(token_ids=[], prompt_length=0), SeededChance(0)

    def run() -> list[float]:
        started = perf_counter()
        probs = pair.law.probs(session.extend(ids).logits[0], history)
        session.keep((cached,))
        chance.begin_round(0)
        (chance.draw(probs[0]) if draw else probs[:1, :1]).tolist()
        return [perf_counter() - started]

    return run


def _rounds(pair: Pair, drafter: str, cached: int, k: int, longest: int) -> Callable[[], list[float]]:
    """Rounds of the public loop that draft K tokens, whatever they are worth; plain ones for K = 0."""
    prompt, stop = _made_up(pair, cached + 1, longest), StopRules(max_new_tokens=_ROUNDS + 1 + k)

    def reject_all(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
        """Judge as ever, then keep nothing and close with the first draft: every round is like the one before."""
        verdict = pair.rule(p, proposal, chance)
        nothing = torch.zeros_like(verdict.num_accepted)
        closing = proposal.ids[:1] if len(proposal.ids) else verdict.closing
        return Verdict(num_accepted=nothing, closing=closing, health=verdict.health)

    def run() -> list[float]:
        events = pair.events(prompt, drafter=drafter, k=k, stop=stop, rule=reject_all)
        return [event.seconds for event in islice(events, 1, _ROUNDS + 1) if isinstance(event, Round)]

    return run
