"""The sampling law: from logits to the probabilities that are drawn from, tested and subtracted.

One function serves target and draft, so the rule always compares what was really used.
Shapes: T rows, V vocab. Order: bias and bans, repetition penalty, presence and frequency penalties, end
tokens ruled out while the output is short, temperature, top-k, top-p, min-p (vLLM's order, and for the
filters transformers' too). Knows nothing about models or draws.
Sources: Holtzman et al. 1904.09751 (top-p), Nguyen et al. 2407.01082 (min-p), Keskar et al. 1909.05858
(repetition penalty), the OpenAI API reference (presence, frequency, bias).
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
    """What shapes the distribution, applied alike to target and draft.

    logit_bias: (token id, what is added to its logit). banned_token_ids: these have no probability.
    repetition_penalty: logits of tokens in prompt or output are divided by it where positive, else multiplied.
    presence_penalty: subtracted from the logits of tokens in the output; frequency_penalty: the same, once for
        each time that they occur there. Every row counts the drafted tokens before it and none behind.
    temperature: 0 is greedy: a one-hot row, the lowest id among equal logits.
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: of those, keep the fewest likeliest whose mass reaches top_p; 1 keeps all.
    min_p: of those, drop what is less likely than min_p times the likeliest; 0 drops none.
    min_new_tokens, end_token_ids: these ids have no probability before that many new tokens.
    Tokens as likely as the last one kept are kept too, so that no order of sorting decides.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_new_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_token_ids: tuple[int, ...] = ()

    def probs(self, logits: Tensor, history: History) -> Tensor:
        """Probabilities [V] or [T, V] for logits of that shape, in float32 or, for float64 logits, float64.

        A row with a NaN or +inf logit comes out all NaN at any temperature: decoding checks for it
        once a round.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.logit_bias or self.banned_token_ids:
            logits = self._bias(logits)
        if self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty:
            logits = self._penalise(logits, history)
        if self.min_new_tokens and self.end_token_ids:
            logits = self._rule_out_ends(logits, history)
        if self.temperature == 0:
            return _one_hot_at_maximum(logits)
        if self.temperature != 1:
            # Shifting first keeps tiny temperatures finite: (l - max) / T is 0 or goes to -inf.
            temperature = max(self.temperature, torch.finfo(logits.dtype).tiny)
            logits = (logits - logits.amax(-1, keepdim=True)) / temperature
        if 0 < self.top_k < logits.shape[-1]:
            threshold = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < threshold, -torch.inf)
        probs = torch.softmax(logits, -1)
        if self.top_p < 1:
            probs = _keep_mass(probs, self.top_p)
        if self.min_p > 0:
            probs = _renormalise(probs, probs < self.min_p * probs.amax(-1, keepdim=True))
        return probs

    def _bias(self, logits: Tensor) -> Tensor:
        if self.logit_bias:
            ids, values = zip(*self.logit_bias, strict=True)
            bias = torch.tensor(values, dtype=logits.dtype, device=logits.device)
            logits = logits.index_add(-1, torch.tensor(ids, device=logits.device), bias.expand(*logits.shape[:-1], -1))
        if self.banned_token_ids:
            banned = torch.tensor(self.banned_token_ids, device=logits.device)
            logits = logits.index_fill(-1, banned, -torch.inf)
        return logits

    def _penalise(self, logits: Tensor, history: History) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        if self.repetition_penalty != 1:
            seen = _counts(history.token_ids, history.drafted, rows) > 0
            penalised = torch.where(rows > 0, rows / self.repetition_penalty, rows * self.repetition_penalty)
            rows = torch.where(seen, penalised, rows)
        if self.presence_penalty or self.frequency_penalty:
            counts = _counts(history.token_ids[history.prompt_length :], history.drafted, rows)
            rows = rows - self.presence_penalty * (counts > 0) - self.frequency_penalty * counts
        return rows.view_as(logits)

    def _rule_out_ends(self, logits: Tensor, history: History) -> Tensor:
        """-inf at the end tokens of the rows that come before the shortest allowed output."""
        num_new_tokens = len(history.token_ids) - history.prompt_length + len(history.drafted)  # before the last row
        rows = logits.reshape(-1, logits.shape[-1])
        short = min(len(rows), self.min_new_tokens - num_new_tokens + len(rows) - 1)
        if short <= 0:
            return logits
        ends = torch.tensor(self.end_token_ids, device=logits.device)
        return torch.cat((rows[:short].index_fill(-1, ends, -torch.inf), rows[short:])).view_as(logits)


def _counts(committed: Sequence[int], drafted: Sequence[Tensor], rows: Tensor) -> Tensor:
    """How often each token stands before each row, in the dtype of `rows`, [T, V]; the last row sees all drafted."""
    num_rows, vocab_size = rows.shape
    ids = torch.tensor(committed, dtype=torch.int64, device=rows.device)
    counts = torch.bincount(ids, minlength=vocab_size).to(rows.dtype).expand(num_rows, -1)
    if not drafted:
        return counts
    # A drafted token counts from the row after it on: the last one in the last row alone.
    first_rows = torch.arange(num_rows - len(drafted), num_rows, device=rows.device).clamp_(min=0)
    new = torch.zeros_like(rows).index_put_((first_rows, torch.cat(tuple(drafted))), rows.new_ones(()), accumulate=True)
    return counts + new.cumsum(0)


def _keep_mass(probs: Tensor, mass: float) -> Tensor:
    """Only the fewest likeliest tokens whose probabilities reach `mass`, and their equals; renormalised."""
    least = torch.stack([_least_kept(row, mass) for row in probs.reshape(-1, probs.shape[-1])])
    return _renormalise(probs, probs < least.view(*probs.shape[:-1], 1))


def _least_kept(row: Tensor, mass: float) -> Tensor:
    """The smallest probability that top-p keeps in a row [V].

    Of the others all those below half of (1 - mass) / V have less than 1 - mass together and cannot be needed, so the
    few above it are sorted alone: all of 150,000 would take longer than a small model's pass.
    """
    candidates = row[row >= (1 - mass) / 2 / len(row)]
    likeliest = candidates.sort(descending=True).values
    sums = likeliest.cumsum(0)
    if not len(sums) or not sums[-1] >= mass:  # NaN, or a mass that rounding makes too near to 1
        likeliest = row.sort(descending=True).values
        sums = likeliest.cumsum(0)
    needed = sums - likeliest < mass  # what comes before falls short
    return likeliest[needed.sum().clamp_(min=1) - 1]


def _renormalise(probs: Tensor, dropped: Tensor) -> Tensor:
    kept = probs.masked_fill(dropped, 0)
    return kept / kept.sum(-1, keepdim=True)


def _one_hot_at_maximum(logits: Tensor) -> Tensor:
    maximum, index = logits.max(-1, keepdim=True)
    nothing = maximum - maximum  # 0, or NaN where the maximum is NaN or infinite
    return nothing.expand_as(logits).scatter(-1, index, nothing + 1)
