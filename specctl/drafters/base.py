"""What a drafter is, and the two shapes a proposal takes.

Shapes: K drafted, V vocab. Knows nothing about the rule that judges a proposal.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specctl.acceptance import Proposal
from specctl.chance import Chance
from specctl.events import Round
from specctl.models.session import Drawn, Forward
from specctl.sampling import History, SamplingLaw


class Drafter(Protocol):
    """Drafts tokens for one request at a time.

    `begin` forgets the last request and reads the prompt (all but its last token); `forward` is the
    target's pass over the same tokens, None for a prompt of one token. `propose` drafts at most
    `limit` tokens after the committed ones in `history`; fewer, or none, is always allowed as long
    as that is not decided by the value of a token that was drawn and is then withheld. `observe`
    hears what became of them, with the target's pass over [last committed, drafted...]; that of a
    round in which nothing was drafted may have no logits.
    """

    @property
    def name(self) -> str: ...

    def begin(self, prompt: Sequence[int], forward: Forward | None) -> None: ...

    def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal: ...

    def observe(self, round_: Round, forward: Forward) -> None: ...


def proposal_of(drawn: Drawn, vocab_size: int) -> Proposal:
    """What was drawn, as a proposal: at temperature 0 a point mass."""
    if drawn.probs is None:
        return PointProposal(drawn.ids, vocab_size, drawn.mass)
    return DenseProposal(drawn.ids, drawn.probs)


class DenseProposal:
    """Tokens drawn from full distributions. ids: [K] int64; q: [K + 1, V], the last row zero."""

    def __init__(self, ids: Tensor, q: Tensor) -> None:
        self.ids, self.q = ids, q

    def at(self, ids: Tensor) -> Tensor:
        return self.q[:-1].gather(1, ids[:, None])[:, 0]

    def row(self, position: Tensor) -> Tensor:
        return self.q.index_select(0, position.view(1))[0]

    def excess(self, weighted: Tensor) -> Tensor:
        return (weighted - self.q[:-1]).clamp_(min=0).sum(1)


def no_proposal(vocab_size: int, device: torch.device) -> Proposal:
    """Nothing drafted. Made once: after a pass every tensor that a round makes costs as much as a small step does."""
    return PointProposal(torch.empty(0, dtype=torch.int64, device=device), vocab_size)


class PointProposal:
    """Tokens proposed with certainty: q is 1 at the token itself. ids: [K] int64.

    mass: [K], that 1, or NaN where a model that chose the token had no finite logits, which the rule then notices.
    """

    def __init__(self, ids: Tensor, vocab_size: int, mass: Tensor | None = None) -> None:
        self.ids, self._vocab_size, self._mass = ids, vocab_size, mass

    @property
    def mass(self) -> Tensor:
        if self._mass is None:
            self._mass = torch.ones(len(self.ids), device=self.ids.device)
        return self._mass

    def at(self, ids: Tensor) -> Tensor:
        return self.mass.where(ids == self.ids, 0)

    def row(self, position: Tensor) -> Tensor:
        nothing = self.ids.new_full((1,), -1)
        token = torch.cat((self.ids, nothing)).index_select(0, position.view(1))
        return (torch.arange(self._vocab_size, device=token.device) == token).to(torch.float32)

    def excess(self, weighted: Tensor) -> Tensor:
        return weighted.scatter(1, self.ids[:, None], 0).sum(1)  # at the token itself q is 1 and weighted at most that
