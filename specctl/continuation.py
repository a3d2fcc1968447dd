"""Drawing tokens one after the other: what plain decoding does with the target, and a draft model with itself.

Two ways with one signature: step by step, for every model and law, which proofs enumerate; and by the session
itself, in one call, where model and law allow it. `draw_with` says which, once; nothing is found out while decoding.
Shapes: T tokens, N drawn, V vocab. Knows nothing about rounds, rules or text.
"""

from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from specctl.chance import Chance, SeededChance
from specctl.models.session import CausalModel, DrawingSession, Drawn, Session
from specctl.sampling import History, SamplingLaw


class Draw(Protocol):
    """Draws `count` tokens (1 or more) under `law` after those in the session and in `feed` [1, T].

    The session has cached all of them but the last by then. history: the tokens before `feed` ends.
    """

    def __call__(
        self,
        session: Session,
        feed: Tensor,
        count: int,
        *,
        law: SamplingLaw,
        history: History,
        chance: Chance,
        keep_logits: bool = False,
    ) -> Drawn: ...


def step_by_step(
    session: Session,
    feed: Tensor,
    count: int,
    *,
    law: SamplingLaw,
    history: History,
    chance: Chance,
    keep_logits: bool = False,
) -> Drawn:
    """A `Draw`: a pass, the law and a draw for each token."""
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


def by_session(
    session: Session,
    feed: Tensor,
    count: int,
    *,
    law: SamplingLaw,
    history: History,
    chance: Chance,
    keep_logits: bool = False,
) -> Drawn:
    """A `Draw` in one call: the same tokens from the same uniforms, without a step of Python for each.

    For sessions of models that draw. Raises ValueError for what they would not follow: a law of more than a
    temperature, logits that are to be kept, or a chance without uniforms.
    """
    if keep_logits or not isinstance(chance, SeededChance) or not _is_temperature_alone(law):
        raise ValueError("a session draws from uniforms under a temperature alone, and keeps no logits")
    return cast(DrawingSession, session).draw(feed, count, law.temperature, chance.uniforms(count))


def draw_with(model: CausalModel, law: SamplingLaw) -> Draw:
    """The fastest way to draw from a model under a law, at any temperature."""
    return by_session if model.capabilities.draws and _is_temperature_alone(law) else step_by_step


@cache
def _is_temperature_alone(law: SamplingLaw) -> bool:
    nothing_else = SamplingLaw(temperature=law.temperature, end_token_ids=law.end_token_ids)  # not ruled out by default
    return type(law) is SamplingLaw and law == nothing_else
