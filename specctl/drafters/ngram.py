"""Prompt lookup: propose what followed the last time that the text ended like this.

No model and no training; the free drafter that every other must beat. Its proposals are point
masses, so the rule stays exact. Source: Saxena, "Prompt Lookup Decoding" (2023), as in vLLM's ngram.
"""

from collections.abc import Sequence

import torch

from specctl.acceptance import Proposal
from specctl.chance import Chance
from specctl.drafters.base import PointProposal, no_proposal
from specctl.events import Round
from specctl.models.session import Forward
from specctl.sampling import History, SamplingLaw


class NgramDrafter:
    """A `Drafter` that copies from the request's own tokens.

    The longest suffix of `maximum` down to `minimum` tokens that occurred before decides; among its
    occurrences the latest wins, and the tokens after it are proposed. No match proposes nothing.
    """

    def __init__(self, *, minimum: int, maximum: int, vocab_size: int, device: torch.device | None = None) -> None:
        self.name = "drafter ngram"
        self._lengths = range(maximum, minimum - 1, -1)
        self._vocab_size = vocab_size
        self._device = device or torch.device("cpu")
        self._nothing = no_proposal(vocab_size, self._device)
        self._seen: dict[tuple[int, ...], int] = {}  # n-gram -> where the token after its latest occurrence stands
        self._num_indexed = 0

    def begin(self, prompt: Sequence[int], forward: Forward | None) -> None:
        self._seen.clear()
        self._num_indexed = 0
        self._index(prompt)

    def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal:
        token_ids = history.token_ids
        self._index(token_ids)
        found: Sequence[int] = ()
        for length in self._lengths:
            start = self._seen.get(tuple(token_ids[-length:])) if length < len(token_ids) else None
            if start is not None:
                found = token_ids[start : start + max(0, limit)]
                break
        if not found:
            return self._nothing
        return PointProposal(torch.tensor(found, dtype=torch.int64, device=self._device), self._vocab_size)

    def _index(self, token_ids: Sequence[int]) -> None:
        """Take in every n-gram that has a token after it; each position once over the whole request."""
        for after in range(max(1, self._num_indexed), len(token_ids)):
            for length in self._lengths:
                if length <= after:
                    self._seen[tuple(token_ids[after - length : after])] = after
        self._num_indexed = len(token_ids)

    def observe(self, round_: Round, forward: Forward) -> None:
        """Nothing is cached but committed tokens, so nothing rolls back."""
