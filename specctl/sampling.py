"""The sampling law: from logits to the probabilities that are drawn from, tested and subtracted.

One function serves target and draft, so the rule always compares what was really used.
Shapes: T rows, V vocab. Order: temperature, then top-k. Knows nothing about models or draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The tokens before a row of logits: what was committed, then what was drafted since.

    token_ids: committed ids, the prompt (the first `prompt_length`) and the output so far.
    drafted: ids ([1] int64 tensors) drafted since. The last row of a [T, V] block of logits comes
        after all of them, the row before it after all but one, and so on.
    """

    token_ids: Sequence[int]
    prompt_length: int
    drafted: Sequence[Tensor] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLaw:
    """Temperature and top-k, applied alike to target and draft.

    temperature: 0 is greedy: a one-hot row, the lowest id among equal logits.
    top_k: keep the k likeliest tokens (ties with the k-th are kept too); 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0

    def probs(self, logits: Tensor, history: History) -> Tensor:
        """Probabilities [..., V] for logits [..., V], in float32 or, for float64 logits, float64.

        A row with a NaN or +inf logit comes out all NaN at any temperature: decoding checks
        for it once a round. `history` is what penalties will read; this law does not depend on it.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.temperature == 0:
            return _one_hot_at_maximum(logits)
        if self.temperature != 1:
            # Shifting first keeps tiny temperatures finite: (l - max) / T is 0 or goes to -inf.
            temperature = max(self.temperature, torch.finfo(logits.dtype).tiny)
            logits = (logits - logits.amax(-1, keepdim=True)) / temperature
        if 0 < self.top_k < logits.shape[-1]:
            threshold = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < threshold, -torch.inf)
        return torch.softmax(logits, -1)


def _one_hot_at_maximum(logits: Tensor) -> Tensor:
    maximum, index = logits.max(-1, keepdim=True)
    nothing = maximum - maximum  # 0, or NaN where the maximum is NaN or infinite
    return nothing.expand_as(logits).scatter(-1, index, nothing + 1)
