"""One vocabulary for a pair: models whose own differs, seen through adapters that read and answer in the target's.

`Trimmed` leaves out the rows of padding that a model has beyond its tokenizer's entries. `Intersected` is a
draft with a tokenizer of its own: its law is restricted to the tokens that both vocabularies hold, so it
drafts nothing else, and whatever else the target wrote it reads spelt in its own tokens. The rule is told
this law, so the output stays exact.
Source: Timor et al. 2502.05202, section 3.3 (TLI, token-level intersection).

Shapes: B sequences, T tokens, N rows asked for, V the target's vocabulary. Knows nothing
about drafters, sampling or files.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specctl.errors import SpecctlError, UsageError
from specctl.models.kernel.decoder import KernelDecoder
from specctl.models.session import Capabilities, CausalModel, Forward, Session
from specctl.tokenizer import Tokenizer

# The logit of a token that the draft lacks: beside any that it has its probability is exactly 0. It is finite, so
# that a row is a distribution even where the draft or the law rules every shared token out.
_ABSENT = -1e30


def trimmed(model: CausalModel, vocab_size: int) -> CausalModel:
    """The model over its first `vocab_size` tokens: itself where it has no more."""
    if isinstance(model, KernelDecoder) and vocab_size < model.vocab_size:
        return model.trimmed(vocab_size)
    return model if model.vocab_size == vocab_size else Trimmed(model, vocab_size)


class Trimmed:
    """A `CausalModel` without the logits of its last rows."""

    def __init__(self, model: CausalModel, vocab_size: int) -> None:
        """Raises UsageError where the model has fewer rows than that."""
        if model.vocab_size < vocab_size:
            raise UsageError(f"{model.name} has {model.vocab_size} vocabulary rows for {vocab_size} tokens")
        self._model = model
        self.name, self.vocab_size, self.context_length = model.name, vocab_size, model.context_length
        self.capabilities = Capabilities(same_bits=model.capabilities.same_bits)

    def session(self, batch_size: int = 1) -> Session:
        return _TrimmedSession(self._model.session(batch_size), self.vocab_size)


class _TrimmedSession:
    def __init__(self, session: Session, vocab_size: int) -> None:
        self._session, self._vocab_size = session, vocab_size
        self.keep = session.keep

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._session.lengths

    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        forward = self._session.extend(ids, num_logits)
        return Forward(forward.logits[..., : self._vocab_size], forward.hidden)


class Mapping:
    """How a draft with another tokenizer reads and writes the target's tokens."""

    def __init__(self, vocab_size: int, shared: dict[int, int], spell: Callable[[int], Sequence[int]]) -> None:
        """vocab_size: V. shared: {the target's id: the draft's}, one to one.

        spell: the draft's ids for any other id of the target; none for one that it skips when it reads.
        Raises UsageError where nothing is shared.
        """
        if not shared:
            raise UsageError("the two vocabularies share no token")
        self.vocab_size, self.num_shared = vocab_size, len(shared)
        self.draft_ids = torch.tensor([shared.get(token_id, 0) for token_id in range(vocab_size)])  # [V]
        absent = [0.0 if token_id in shared else _ABSENT for token_id in range(vocab_size)]
        self.lowered = torch.tensor(absent)  # [V], what is added to a row
        self._spell = spell
        self._spelt: dict[int, Sequence[int]] = {token_id: (draft_id,) for token_id, draft_id in shared.items()}

    @classmethod
    def between(cls, target: Tokenizer, draft: Tokenizer) -> "Mapping":
        """The mapping of two tokenizers by what their tokens stand for."""
        shared = target.shared_with(draft)
        return cls(target.vocab_size, shared, lambda token_id: draft.spell(target.token_bytes(token_id)))

    def spell(self, token_id: int) -> Sequence[int]:
        """The draft's tokens for one of the target's."""
        if token_id not in self._spelt:
            self._spelt[token_id] = self._spell(token_id)
        return self._spelt[token_id]


class Intersected:
    """A draft over the target's vocabulary, a `CausalModel`; the tokens that it lacks have no probability.

    A session reads a text as the draft's tokens for each of the target's: one where it is shared, else as many
    as spell it, or none. Where they are more than its context holds it drops what is older than half of that.
    """

    capabilities = Capabilities()

    def __init__(self, draft: CausalModel, mapping: Mapping) -> None:
        self._draft, self.mapping = draft, mapping
        self.name, self.vocab_size, self.context_length = draft.name, mapping.vocab_size, draft.context_length

    def session(self, batch_size: int = 1) -> Session:
        if batch_size != 1:
            raise SpecctlError(f"{self.name} reads another vocabulary than the target's, one sequence at a time")
        return _IntersectedSession(self._draft, self.mapping)


class _IntersectedSession:
    """Counts the target's tokens; `_start` is the first draft token that the cache holds."""

    def __init__(self, draft: CausalModel, mapping: Mapping) -> None:
        self._session, self._mapping = draft.session(), mapping
        self._context, self._window = draft.context_length, max(1, draft.context_length // 2)
        self._spelt: list[int] = []  # the draft's tokens for all that was read
        self._ends: list[int] = []  # how many of them there are after each of the target's
        self._start = 0
        self._draft_ids, self._lowered = mapping.draft_ids, mapping.lowered

    @property
    def lengths(self) -> tuple[int, ...]:
        return (len(self._ends),)

    def keep(self, lengths: tuple[int, ...]) -> None:
        (kept,) = lengths
        if not 0 <= kept <= len(self._ends):
            raise ValueError(f"cannot keep {kept} tokens of {len(self._ends)}")
        end = self._ends[kept - 1] if kept else 0
        del self._ends[kept:], self._spelt[end:]
        if self._start and end - self._start < self._window:
            self._start_at(max(0, end - self._window))  # what is left is less than a window
        else:
            self._session.keep((min(self._session.lengths[0], end - self._start),))

    def _start_at(self, start: int) -> None:
        """Empty the cache; what comes after `start` is read with the next pass."""
        self._session.keep((0,))
        self._start = start

    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        done = len(self._ends)
        for token_id in ids[0].tolist():
            self._spelt += self._mapping.spell(token_id)
            self._ends.append(len(self._spelt))
        wanted = len(self._ends) - (ids.shape[1] if num_logits is None else num_logits)
        rows: list[Tensor] = []
        while done < len(self._ends):
            until = self._make_room(done)
            rows += self._read(max(done, wanted), until, ids.device)
            done = until
        logits = (rows[0] if len(rows) == 1 else torch.cat(rows))[None]  # [1, N, V]
        return Forward(logits, logits[..., :0])

    def _make_room(self, done: int) -> int:
        """Up to which of the target's tokens the cache has room, one more than `done` at least."""
        if self._ends[done] > self._start + self._context:
            self._start_at(self._ends[done] - self._window)
        room = self._start + self._context
        return next((at for at in range(done + 1, len(self._ends)) if self._ends[at] > room), len(self._ends))

    def _read(self, first: int, until: int, device: torch.device) -> list[Tensor]:
        """Read on to the target's token `until`; logits [until - first, V] after the tokens from `first` on, if any."""
        cached, end = self._start + self._session.lengths[0], self._ends[until - 1]
        if first < until and self._start < self._ends[first] == cached:
            cached -= 1  # a token that is skipped has the row of the one before it, which is read again
            self._session.keep((cached - self._start,))
        feed = self._spelt[cached:end]
        places = [self._ends[at] - 1 - cached for at in range(first, until)]  # in the feed
        if not feed and not places:
            return []
        # Where nothing can be read the pass over some token gives rows their form, and is forgotten.
        read = torch.tensor([feed or [0]], device=device)
        count = read.shape[1] - max(0, places[0]) if places else 1
        logits = self._session.extend(read, num_logits=count).logits[0]
        if not feed:
            self._session.keep((0,))
        return [self._in_target_ids(logits, [place - read.shape[1] + count for place in places])] if places else []

    def _in_target_ids(self, logits: Tensor, places: list[int]) -> Tensor:
        """Rows of the draft's logits in the target's order, [N, V]; uniform before the first one."""
        if self._lowered.device != logits.device or self._lowered.dtype != logits.dtype:
            self._draft_ids, self._lowered = self._draft_ids.to(logits.device), self._lowered.to(logits)
        if places != list(range(len(logits))):
            at = torch.tensor(places, device=logits.device)
            logits = logits.index_select(0, at.clamp(min=0))
        rows = logits.index_select(1, self._draft_ids).add_(self._lowered).clamp_(min=_ABSENT)
        rows[: sum(place < 0 for place in places)] = _ABSENT  # what was skipped before anything was read
        return rows


def num_read(model: CausalModel, token_ids: Sequence[int]) -> int:
    """Tokens of its context that a model needs for a text of the target's."""
    if not isinstance(model, Intersected):
        return len(token_ids)
    return max(len(token_ids), sum(len(model.mapping.spell(token_id)) for token_id in token_ids))
