"""Drafting with a small language model: K steps, each drawn under the run's own sampling law.

Source: Leviathan et al. 2211.17192, algorithm 1, lines 1 to 5.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.acceptance import Proposal
from specctl.chance import Chance
from specctl.continuation import Draw, step_by_step
from specctl.drafters.base import no_proposal, proposal_of
from specctl.events import Round
from specctl.models.session import CausalModel, Forward
from specctl.sampling import History, SamplingLaw


class DraftModel:
    """A `Drafter` around a `CausalModel`.

    Its session lacks the tokens committed since it last ran (one, or two after a fully accepted
    round), and the first step of a round feeds exactly those. Where the draft's context is shorter
    than the text it reads a window: when the window is full the older half is dropped and the rest
    read anew. Its q is then that of the window, and the output as exact as ever.
    """

    def __init__(
        self, model: CausalModel, name: str, device: torch.device | None = None, draw: Draw = step_by_step
    ) -> None:
        """draw: how, as `draw_with` chooses for the model and the law that it drafts under."""
        self.name = name
        self.model = model
        self.draw = draw
        self._device = device or torch.device("cpu")
        self._nothing = no_proposal(model.vocab_size, self._device)
        self._session = model.session()
        self._num_committed = 0
        self._window_start = 0  # the committed token that stands first in the session

    def drawing_with(self, draw: Draw) -> "DraftModel":
        """The same model in a session of its own, drawn from in another way."""
        return DraftModel(self.model, self.name, self._device, draw)

    def begin(self, prompt: Sequence[int], forward: Forward | None) -> None:
        self._session.keep((0,))
        self._window_start = 0
        self._slide(len(prompt), 1)
        readable = prompt[self._window_start : -1]
        if readable:
            self._session.extend(self._ids(readable), num_logits=1)

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor([token_ids], device=self._device)

    def _slide(self, num_committed: int, limit: int) -> int:
        """Make room for drafting `limit` tokens after the committed ones; the number that there is room for."""
        context = self.model.context_length
        if num_committed - self._window_start + limit - 1 <= context:
            return limit
        window = max(1, context // 2)
        self._session.keep((0,))
        self._window_start = max(0, num_committed - window)
        return min(limit, context - window + 1)

    def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal:
        token_ids = history.token_ids
        self._num_committed = len(token_ids)
        if limit <= 0:
            return self._nothing
        limit = self._slide(len(token_ids), limit)
        feed = self._ids(token_ids[self._window_start + self._session.lengths[0] :])
        drawn = self.draw(self._session, feed, limit, law=law, history=history, chance=chance)
        return proposal_of(drawn, self.model.vocab_size)

    def observe(self, round_: Round, forward: Forward) -> None:
        """Roll back to the committed tokens that are cached: those before the round and the accepted."""
        committed = self._num_committed + round_.num_accepted - self._window_start
        self._session.keep((min(self._session.lengths[0], committed),))
