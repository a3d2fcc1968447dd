"""What the decoding loop reports: frozen values that streaming, statistics and traces fold over."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["eos", "stop", "length", "context"]
Closing = Literal["recovered", "bonus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """An emitted token under the target's raw law, before penalties, temperature and filters.

    logprob: nats. alternatives: (token id, logprob) of the likeliest tokens, the likeliest first.
    """

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One target pass: tokens drafted, how many survived, what was emitted.

    `emitted` is the accepted drafts followed by the closing token, cut where a stop was found;
    a round of plain decoding drafts nothing and its one token closes as "bonus". `num_drafted`
    and `num_accepted` leave out positions that the cut removed, so that over a whole request
    accepted tokens plus closing tokens equal new tokens. `draft_seconds`, `verify_seconds` (the
    target's pass and its probabilities) and `accept_seconds` (the rule and the transfer to the host)
    are parts of `seconds`; the rest is bookkeeping. `logprobs` has an entry for each emitted
    token, or is None where they were not asked for.
    """

    index: int
    drafted: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    emitted: tuple[int, ...]
    closing: Closing | None  # None when a stop cut the closing token off
    seconds: float
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a request. `prompt_seconds` is the time of the prompt passes, target and draft."""

    reason: FinishReason
    prompt_seconds: float


Event = Round | Finished
