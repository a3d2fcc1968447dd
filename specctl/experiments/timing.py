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
from specctl.models.llama import LlamaDecoder
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

    Raises UsageError where the context does not hold the rows of the largest K.
    """
    ks = sorted(k for k in set(ks) if k > 0)
    target, draft = pair.target, pair.draft(drafter)
    context = min(target.context_length, draft.context_length)
    cached = min(_CACHED_TOKENS, context - max(ks, default=0) - 1)
    if cached < 1:
        raise UsageError(f"K = {ks[-1]} does not fit into a context of {context} tokens; lower K")
    parts: dict[object, Callable[[], object]] = {"target": _step(pair, target, cached, draw=True)}
    parts["draft"] = _step(pair, draft, cached, draw=True)
    parts |= {("rows", k + 1): _step(pair, target, cached, rows=k + 1) for k in ks}
    parts |= {("rule", k): _judge(pair, k) for k in ks}
    times: dict[object, list[float]] = {name: [] for name in parts}
    with torch.inference_mode():
        for trial in range(_TRIALS):
            for name, run in parts.items():
                started = perf_counter()
                run()
                if trial >= _TRIALS // 4:  # the rest is warm-up
                    times[name].append(perf_counter() - started)
    seconds = {name: median(values) for name, values in times.items()}
    step = seconds["target"]
    return Costs(
        target_step_seconds=step,
        cost_ratio=seconds["draft"] / step,
        verify_cost={1: 1.0} | {k + 1: seconds["rows", k + 1] / step for k in ks},
        overhead={k: seconds["rule", k] / step for k in ks},
    )


def _step(pair: Pair, model: LlamaDecoder, cached: int, rows: int = 1, draw: bool = False) -> Callable[[], object]:
    """A pass over `rows` tokens after `cached` ones, its probabilities and, with `draw`, a token on the host."""
    session = model.session()
    session.extend(torch.zeros(1, cached, dtype=torch.int64, device=pair.device))
    ids = torch.zeros(1, rows, dtype=torch.int64, device=pair.device)
    history, chance = History(token_ids=[], prompt_length=0), SeededChance(0)

    def run() -> object:
        probs = pair.law.probs(session.extend(ids).logits[0], history)
        session.keep((cached,))
        chance.begin_round(0)
        return chance.draw(probs[0]).tolist() if draw else probs[:1, :1].tolist()

    return run


def _judge(pair: Pair, k: int) -> Callable[[], object]:
    """The rule on K drafts that agree with the target, to the verdict on the host."""
    vocab_size = pair.target.vocab_size
    p = torch.full((k + 1, vocab_size), 1 / vocab_size, device=pair.device)
    q = torch.cat((p[:-1], torch.zeros_like(p[:1])))
    proposal, chance = DenseProposal(torch.zeros(k, dtype=torch.int64, device=pair.device), q), SeededChance(0)

    def run() -> object:
        chance.begin_round(0)
        verdict = token_rule(p, proposal, chance)
        return torch.cat((verdict.num_accepted.view(1), verdict.closing)).tolist()

    return run
