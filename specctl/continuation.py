"""Drawing tokens one after the other: what plain decoding does with the target, and a draft model with itself.

One function for both, so that the baseline and the draft are equally well tuned.
Shapes: T tokens, N drawn, V vocab. Knows nothing about rounds, rules or text.
"""

from functools import cache

import torch
from torch import Tensor

from specctl.chance import Chance, SeededChance
from specctl.models.session import Drawn, Session
from specctl.sampling import History, SamplingLaw


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
        drawn: Drawn = draw(feed, count, law.temperature, chance.uniforms(count))
        return drawn
    ids, rows, logits = list(history.drafted), [], []
    num_before = len(ids)
    for _ in range(count):
        forward = session.extend(feed, num_logits=1)
        logits.append(forward.logits[0, -1])
        seen = History(token_ids=history.token_ids, prompt_length=history.prompt_length, drafted=ids)
        rows.append(law.probs(logits[-1], seen))
        ids.append(chance.draw(rows[-1]))
        feed = ids[-1].view(1, 1)
    probs, drawn_ids = torch.stack([*rows, torch.zeros_like(rows[0])]), torch.cat(ids[num_before:])
    return Drawn(
        ids=drawn_ids,
        mass=probs[:-1].gather(1, drawn_ids[:, None])[:, 0],
        probs=probs if law.temperature else None,
        hidden=forward.hidden,
        logits=torch.stack(logits) if keep_logits else None,
    )


@cache
def _is_temperature_alone(law: SamplingLaw) -> bool:
    nothing_else = SamplingLaw(temperature=law.temperature, end_token_ids=law.end_token_ids)  # not ruled out by default
    return type(law) is SamplingLaw and law == nothing_else
