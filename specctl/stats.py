"""A fold over events into the field's metrics; `docs/metrics.md` defines each."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from specctl.events import Event, Finished, FinishReason, Round


@dataclass(slots=True)
class Stats:
    """Counts and times of one request, or of several added together.

    seconds: decoding rounds only; prompt_seconds: the prompt passes, beside it.
    reached[i], accepted_at[i]: rounds in which position i was judged, and accepted.
    """

    num_new_tokens: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_closing: int = 0
    seconds: float = 0.0
    prompt_seconds: float = 0.0
    reached: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    def add(self, event: Event) -> None:
        """Count one event in."""
        if isinstance(event, Finished):
            self.reason = event.reason
            self.prompt_seconds += event.prompt_seconds
            return
        self.num_new_tokens += len(event.emitted)
        self.num_rounds += 1
        self.num_drafted += event.num_drafted
        self.num_accepted += event.num_accepted
        self.num_closing += event.closing is not None
        self.seconds += event.seconds
        self._count_positions(event)

    def _count_positions(self, event: Round) -> None:
        missing = event.num_drafted - len(self.reached)
        self.reached += [0] * missing
        self.accepted_at += [0] * missing
        judged = min(event.num_drafted, event.num_accepted + 1)
        for position in range(judged):
            self.reached[position] += 1
            self.accepted_at[position] += position < event.num_accepted

    def merge(self, other: "Stats") -> None:
        """Add another request's counts and times to this one's."""
        for name in ("num_new_tokens", "num_rounds", "num_drafted", "num_accepted", "num_closing"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seconds += other.seconds
        self.prompt_seconds += other.prompt_seconds
        self.reached = [a + b for a, b in zip_longest(self.reached, other.reached, fillvalue=0)]
        self.accepted_at = [a + b for a, b in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)]

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        return self.num_new_tokens / self.num_rounds if self.num_rounds else None

    @property
    def conditional_acceptance(self) -> list[float]:
        """P(token i accepted | all before it accepted), for each position that was ever reached."""
        return [a / r for a, r in zip(self.accepted_at, self.reached, strict=True) if r]

    @property
    def tokens_per_second(self) -> float | None:
        return self.num_new_tokens / self.seconds if self.seconds > 0 else None

    @property
    def end_to_end_tokens_per_second(self) -> float | None:
        seconds = self.seconds + self.prompt_seconds
        return self.num_new_tokens / seconds if seconds > 0 else None

    def figures(self) -> dict[str, Any]:
        """Every figure by its public name; None where it does not exist."""
        names: tuple[str, ...] = ("num_new_tokens", "num_rounds", "num_drafted", "num_accepted", "acceptance_rate")
        names += ("conditional_acceptance", "mean_acceptance_length", "tokens_per_second")
        names += ("end_to_end_tokens_per_second", "seconds", "prompt_seconds")
        return {name: getattr(self, name) for name in names}


def collect(events: Iterable[Event], into: Stats | None = None) -> tuple[list[int], Stats]:
    """Run events to their end; return the new token ids and the statistics (added to `into` if given)."""
    stats = into or Stats()
    token_ids: list[int] = []
    for event in events:
        stats.add(event)
        if isinstance(event, Round):
            token_ids += event.emitted
    return token_ids, stats
