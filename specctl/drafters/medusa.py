"""Drafting from the target itself: Medusa heads on its last hidden state guess the next tokens at once.

Each head's softmax, under the run's own sampling law, is the q of its position: the tokens are drawn
from it, so the rule stays exact. A head knows nothing of the tokens drawn before its own.
Source: Cai et al. 2401.10774 (heads), Leviathan et al. 2211.17192 (the rule that judges them).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.acceptance import Proposal
from specctl.chance import Chance
from specctl.drafters.base import DenseProposal, PointProposal, no_proposal
from specctl.errors import UsageError
from specctl.events import Round
from specctl.models.medusa import MedusaDecoder
from specctl.models.session import Forward
from specctl.sampling import History, SamplingLaw


class MedusaDrafter:
    """A `Drafter` that needs the target's hidden state of the last position before the last committed token.

    That row's own output is the last committed token, so head 0 guesses the one after it. After a
    prompt of one token there is no such row yet, and the first round drafts nothing.
    """

    def __init__(self, heads: MedusaDecoder, name: str, vocab_size: int | None = None) -> None:
        """vocab_size: leaves out the heads' rows beyond it, of a target with rows of padding."""
        self.name = name
        self._heads, self._vocab_size = heads, vocab_size or heads.shape.vocab_size
        self._nothing = no_proposal(self._vocab_size, heads.device)
        self._hidden: Tensor | None = None  # [D]

    def begin(self, prompt: Sequence[int], forward: Forward | None) -> None:
        self._hidden = None if forward is None else forward.hidden[0, -1]

    def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal:
        """Raises UsageError where more tokens are asked for than there are heads."""
        shape = self._heads.shape
        if limit > shape.num_heads:
            raise UsageError(f"{self.name} has {shape.num_heads} heads and cannot draft {limit} tokens; lower K")
        if self._hidden is None or limit <= 0:
            return self._nothing
        logits = self._heads.logits(self._hidden, limit)[:, : self._vocab_size]  # [K, V]
        drafted: list[Tensor] = []
        rows: list[Tensor] = []
        for head in range(limit):
            seen = History(token_ids=history.token_ids, prompt_length=history.prompt_length, drafted=drafted)
            rows.append(law.probs(logits[head], seen))
            drafted.append(chance.draw(rows[-1]))
        ids, probs = torch.cat(drafted), torch.stack([*rows, torch.zeros_like(rows[0])])
        if law.temperature == 0:
            return PointProposal(ids, self._vocab_size, probs[:-1].gather(1, ids[:, None])[:, 0])
        return DenseProposal(ids, probs)

    def observe(self, round_: Round, forward: Forward) -> None:
        """Take the row that the closing token was drawn from: that of the last accepted token."""
        self._hidden = forward.hidden[0, round_.num_accepted]
