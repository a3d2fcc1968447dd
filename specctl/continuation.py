"""Drawing tokens one after the other: what plain decoding does with the target, and a draft model with itself.

One function for both, so that the baseline and the draft are equally well tuned.
Shapes: T tokens, N drawn, V vocab. Knows nothing about rounds, rules or text.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from specctl.chance import Chance, SeededChance
from specctl.models.session import Session
from specctl.sampling import History, SamplingLaw


@dataclass(frozen=True, slots=True)
class Drawn:
    """ids: [N] int64. probs: [N + 1, V], what each was drawn from, and a row of zeros. logits: [N, V] if kept."""

    ids: Tensor
    probs: Tensor
    logits: Tensor | None


def draw_tokens(
    session: Session,
    feed: Tensor,
    count: int,
    *,
    law: SamplingLaw,
    history: History,
    chance: Chance,
    keep_logits: bool = False,
) -> Drawn:
    """Draw `count` tokens (1 or more) under `law` after those in the session and in `feed` [1, T].

    The session has cached all of them but the last by then. A session that can do all of this itself does, where
    the law is a temperature alone: the same tokens, from the same uniforms, without a step of Python for each.
    """
    draw = getattr(session, "draw", None)
    if draw is not None and not keep_logits and isinstance(chance, SeededChance) and _is_temperature_alone(law):
        ids, probs = draw(feed, count, law.temperature, chance.uniforms(count))
        return Drawn(ids, probs, None)
    drawn, rows, logits = list(history.drafted), [], []
    num_before = len(drawn)
    for _ in range(count):
        logits.append(session.extend(feed, num_logits=1).logits[0, -1])
        seen = History(token_ids=history.token_ids, prompt_length=history.prompt_length, drafted=drawn)
        rows.append(law.probs(logits[-1], seen))
        drawn.append(chance.draw(rows[-1]))
        feed = drawn[-1].view(1, 1)
    probs = torch.stack([*rows, torch.zeros_like(rows[0])])
    return Drawn(torch.cat(drawn[num_before:]), probs, torch.stack(logits) if keep_logits else None)


@cache
def _is_temperature_alone(law: SamplingLaw) -> bool:
    nothing_else = SamplingLaw(temperature=law.temperature, end_token_ids=law.end_token_ids)  # not ruled out by default
    return type(law) is SamplingLaw and law == nothing_else
