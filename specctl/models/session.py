"""What decoding needs from a model, as protocols: any model that can roll its cache back will do.

Shapes: B sequences, T tokens, V vocab, D width. Lengths are absolute and per row, and the sessions
of this package keep all rows equally long.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Forward:
    """What a pass computes.

    logits: [B, N, V] for the last N tokens of the pass (all T unless fewer were asked for).
    hidden: [B, N, D], the states after the final norm that the logits come from.
    """

    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """N tokens drawn one after the other.

    ids: [N] int64. mass: [N], the probability that each was drawn with; NaN where the model's logits were not finite.
    probs: [N + 1, V], what each was drawn from, and a row of zeros; None at temperature 0, where each is the only
        token that there is.
    hidden: [1, 1, D], the state that the last one was drawn from. logits: [N, V], if they were kept.
    """

    ids: Tensor
    mass: Tensor
    probs: Tensor | None
    hidden: Tensor
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a model says that it can do beside opening sessions.

    draws: its sessions draw tokens by themselves under a temperature alone, in float32 on a CPU (`DrawingSession`).
    same_bits: a token's logits are the same bits whatever else is in its pass.
    """

    draws: bool = False
    same_bits: bool = False


class Session(Protocol):
    """A model and its cache for B sequences."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens cached, per row."""

    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        """Append ids [B, T] to the cache and return logits for the last `num_logits` (all T if None)."""

    def keep(self, lengths: tuple[int, ...]) -> None:
        """Roll back: keep the first `lengths` tokens of each row."""


class DrawingSession(Session, Protocol):
    """A session of a model that `draws`."""

    def draw(self, feed: Tensor, count: int, temperature: float, uniforms: Tensor) -> Drawn:
        """Draw tokens after `feed` [1, T], each from one of `uniforms` ([count] float64), as `SeededChance` would."""


class CausalModel(Protocol):
    """A model that can open sessions."""

    @property
    def name(self) -> str:
        """How messages call it."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""

    @property
    def context_length(self) -> int:
        """The most tokens that a session can cache."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def session(self, batch_size: int = 1) -> Session:
        """An empty session."""
