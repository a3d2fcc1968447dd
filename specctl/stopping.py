"""When a request ends: end tokens, the budget, the context limit. The one place that knows.

Knows token ids only. A request emits at most min(max_new_tokens, context - prompt) tokens; the end
token counts as emitted and is the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specctl.errors import UsageError
from specctl.events import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """What ends a request. eos_token_ids: any of these; max_new_tokens: at least 0."""

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()


class Stopping:
    """Counts one request down and cuts what goes beyond."""

    def __init__(self, rules: StopRules, prompt_length: int, context_length: int) -> None:
        """Raises UsageError for an empty prompt or one that fills the context."""
        if prompt_length == 0:
            raise UsageError("the prompt has no tokens; give at least one character")
        if prompt_length >= context_length:
            raise UsageError(
                f"the prompt has {prompt_length} tokens and the context holds {context_length}; "
                f"shorten it to {context_length - 1} or fewer"
            )
        room = context_length - prompt_length
        self._eos = rules.eos_token_ids
        self.remaining = min(rules.max_new_tokens, room)
        self._at_budget: FinishReason = "length" if rules.max_new_tokens <= room else "context"
        self.reason: FinishReason | None = self._at_budget if self.remaining == 0 else None

    def keep(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The leading tokens that the request may still emit; sets `reason` when it has ended."""
        for position, token_id in enumerate(token_ids[: self.remaining]):
            if token_id in self._eos:
                self.reason = "eos"
                self.remaining = 0
                return token_ids[: position + 1]
        kept = token_ids[: self.remaining]
        self.remaining -= len(kept)
        if self.remaining == 0:
            self.reason = self._at_budget
        return kept
