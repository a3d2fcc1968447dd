"""A model that forgets: every pass reads the whole text anew, as the first loops of this project did.

Behind the protocols of `specctl/models/session.py`, so that the public decoding loops run on it unchanged and
what differs in speed is the cache alone.
"""

import torch
from torch import Tensor

from specctl.models.session import Capabilities, CausalModel, Forward


class Cacheless:
    """A `CausalModel` around another, without its cache."""

    capabilities = Capabilities()

    def __init__(self, model: CausalModel) -> None:
        self.name, self.vocab_size, self.context_length = model.name, model.vocab_size, model.context_length
        self._model = model

    def session(self, batch_size: int = 1) -> "CachelessSession":
        return CachelessSession(self._model, batch_size)


class CachelessSession:
    """A `Session` that keeps ids rather than keys and values."""

    def __init__(self, model: CausalModel, batch_size: int) -> None:
        self._inner = model.session(batch_size)  # one, emptied before each pass: its memory is not made anew
        self._ids = torch.empty(batch_size, 0, dtype=torch.int64)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._ids.shape[1],) * len(self._ids)

    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        self._ids = torch.cat((self._ids.to(ids.device), ids), dim=1)
        self._inner.keep((0,) * len(self._ids))
        return self._inner.extend(self._ids, num_logits=ids.shape[1] if num_logits is None else num_logits)

    def keep(self, lengths: tuple[int, ...]) -> None:
        self._ids = self._ids[:, : lengths[0]]
