"""When a request ends: end tokens, stop strings, the budget, the context limit. The one place that knows.

Knows token ids, and text only as what a `TextSource` makes of them. Tokens are taken one by one, so
that the end does not depend on how decoding grouped them into rounds: plain and speculative decoding
stop at the same token for the same reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specctl.errors import UsageError
from specctl.events import FinishReason


class TextSource(Protocol):
    """Turns ids that arrive in pieces into text, never half a character."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """What ends a request.

    max_new_tokens: at least 0; a request emits at most min(max_new_tokens, context - prompt) tokens.
    min_new_tokens: nothing else ends a request before it has this many.
    eos_token_ids (reason "eos") and stop_token_ids ("stop"): any of these; it is the last token emitted.
    stop_strings ("stop"): the token that completes one is the last emitted; `VisibleText` has the text.
    text: opens the text of a request, given its prompt; needed where there are stop strings.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    text: Callable[[Sequence[int]], TextSource] | None = None

    @property
    def can_end(self) -> bool:
        """Whether anything but the budget and the context can end a request."""
        return bool(self.eos_token_ids or self.stop_token_ids or self.stop_strings)


class VisibleText:
    """The text of a request up to its first stop string, handed out as soon as no stop can take it back.

    A stop string counts when it is completed after `min_new_tokens` tokens; of two completed by the
    same token the one that begins first decides. The pieces joined are the text without the stop string.
    """

    def __init__(self, source: TextSource, stop_strings: Sequence[str] = (), min_new_tokens: int = 0) -> None:
        self._source, self._stops, self._min_new_tokens = source, tuple(stop_strings), min_new_tokens
        self._held = ""  # the end of the text, as far as it may be the beginning of a stop string
        self._num_tokens = 0
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids, up to a stop, and return the text that they make visible."""
        if not self._stops:
            return self._source.push(token_ids)
        return "".join(self._push(token_id) for token_id in token_ids if not self.stopped)

    def _push(self, token_id: int) -> str:
        self._num_tokens += 1
        piece = self._source.push([token_id])
        text = self._held + piece
        if self._num_tokens > self._min_new_tokens:
            # Only what ends inside the newest piece: what was completed before did not count then either.
            first_end = len(text) - len(piece) + 1
            begins = [place for stop in self._stops if (place := text.find(stop, max(0, first_end - len(stop)))) >= 0]
            if begins:
                self.stopped = True
                return text[: min(begins)]
        num_held = self._num_unsure(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _num_unsure(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        endings = (length for length in range(longest, 0, -1))
        return next((n for n in endings if any(s.startswith(text[-n:]) and len(s) > n for s in self._stops)), 0)

    def finish(self) -> str:
        """What was held back and is text after all."""
        return "" if self.stopped else self._held + self._source.finish()


class Stopping:
    """Counts one request down and cuts what goes beyond."""

    def __init__(self, rules: StopRules, prompt: Sequence[int], context_length: int) -> None:
        """Raises UsageError for an empty prompt or one that fills the context."""
        prompt_length = len(prompt)
        if prompt_length == 0:
            raise UsageError("the prompt has no tokens; give at least one character")
        if prompt_length >= context_length:
            raise UsageError(
                f"the prompt has {prompt_length} tokens and the context holds {context_length}; "
                f"shorten it to {context_length - 1} or fewer"
            )
        room = context_length - prompt_length
        self._rules = rules
        self._text: VisibleText | None = None
        if rules.stop_strings:
            assert rules.text is not None, "stop strings need the text of a request"
            self._text = VisibleText(rules.text(prompt), rules.stop_strings, rules.min_new_tokens)
        self._num_emitted = 0
        self.remaining = min(rules.max_new_tokens, room)
        self._at_budget: FinishReason = "length" if rules.max_new_tokens <= room else "context"
        self.reason: FinishReason | None = self._at_budget if self.remaining == 0 else None

    def keep(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The leading tokens that the request may still emit; sets `reason` when it has ended."""
        for position, token_id in enumerate(token_ids[: self.remaining]):
            self._num_emitted += 1
            self.reason = self._reason_at(token_id)
            if self.reason:
                self.remaining = 0
                return token_ids[: position + 1]
        kept = token_ids[: self.remaining]
        self.remaining -= len(kept)
        if self.remaining == 0:
            self.reason = self._at_budget
        return kept

    def _reason_at(self, token_id: int) -> FinishReason | None:
        if self._text is not None:
            self._text.push([token_id])
        if self._num_emitted <= self._rules.min_new_tokens:
            return None
        if token_id in self._rules.eos_token_ids:
            return "eos"
        if token_id in self._rules.stop_token_ids or (self._text is not None and self._text.stopped):
            return "stop"
        return None
