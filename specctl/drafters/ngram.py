"""Prompt lookup: propose what followed the last time that the text ended like this.

No model and no training; the free drafter that every other must beat. Its proposals are point
masses, so the rule stays exact. Source: Saxena, "Prompt Lookup Decoding" (2023), as in vLLM's ngram.
"""

from collections.abc import Sequence

import torch

from specctl.acceptance import Proposal
from specctl.chance import Chance
from specctl.drafters.base import PointProposal, no_proposal
from specctl.drafters.suffixes import Suffixes
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
        self._minimum, self._maximum = minimum, maximum
        self._vocab_size = vocab_size
        self._device = device or torch.device("cpu")
        self._nothing = no_proposal(vocab_size, self._device)
        self._text = Suffixes(maximum)

    def begin(self, prompt: Sequence[int], forward: Forward | None) -> None:
        self._text = Suffixes(self._maximum)
        self._text.extend(prompt[:-1])

    def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal:
        token_ids = history.token_ids
        self._text.extend(token_ids[len(self._text) :])
        length, after = self._text.latest()
        if length < self._minimum or limit < 1:
            return self._nothing
        found = torch.tensor(token_ids[after : after + limit], dtype=torch.int64, device=self._device)
        return PointProposal(found, self._vocab_size)

    def observe(self, round_: Round, forward: Forward) -> None:
        """Nothing is cached but committed tokens, so nothing rolls back."""
