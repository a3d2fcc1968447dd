"""Drafting with a small language model: K steps, each drawn under the run's own sampling law.

Source: Leviathan et al. 2211.17192, algorithm 1, lines 1 to 5.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.acceptance import Proposal
from specctl.chance import Chance
from specctl.drafters.base import DenseProposal, PointProposal
from specctl.events import Round
from specctl.models.session import CausalModel, Forward
from specctl.sampling import History, SamplingLaw


class DraftModel:
    """A `Drafter` around a `CausalModel`.

    Its session lacks the tokens committed since it last ran (one, or two after a fully accepted
    round), and the first step of a round feeds exactly those. Near the end of the draft's own
    context it drafts less, and beyond it nothing: rounds are then plain steps, still exact.
    """

    def __init__(self, model: CausalModel, name: str, device: torch.device | None = None) -> None:
        self.name = name
        self._model = model
        self._device = device or torch.device("cpu")
        self._session = model.session()
        self._num_committed = 0

    def begin(self, prompt: Sequence[int], forward: Forward | None) -> None:
        self._session.keep((0,))
        readable = prompt[: min(len(prompt) - 1, self._model.context_length)]
        if readable:
            self._session.extend(self._ids(readable), num_logits=1)

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor([token_ids], device=self._device)

    def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal:
        token_ids = history.token_ids
        self._num_committed = len(token_ids)
        limit = min(limit, self._model.context_length - self._num_committed + 1)
        if limit <= 0:
            return PointProposal(torch.empty(0, dtype=torch.int64, device=self._device), self._model.vocab_size)
        feed = self._ids(token_ids[self._session.lengths[0] :])
        drafted: list[Tensor] = []
        rows: list[Tensor] = []
        for _ in range(limit):
            logits = self._session.extend(feed, num_logits=1).logits[0, -1]
            seen = History(token_ids=token_ids, prompt_length=history.prompt_length, drafted=drafted)
            rows.append(law.probs(logits, seen))
            drafted.append(chance.draw(rows[-1]))
            feed = drafted[-1].view(1, 1)
        return DenseProposal(torch.cat(drafted), torch.stack([*rows, torch.zeros_like(rows[0])]))

    def observe(self, round_: Round, forward: Forward) -> None:
        """Roll back to the committed tokens that are cached: those before the round and the accepted."""
        self._session.keep((min(self._session.lengths[0], self._num_committed + round_.num_accepted),))
