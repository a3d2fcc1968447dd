"""What is verified: the parts that `speculative()` is made of, and forwards that share no cache with it.

A planted bug is a function that wraps some of the parts; the loop itself is never copied. Knows
nothing about what is checked.

Shapes: B sequences, T tokens, V vocab.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from specctl.acceptance import token_rule
from specctl.chance import Chance
from specctl.continuation import Draw, by_session, draw_with, step_by_step
from specctl.decoding import Observer, Rule, plain, speculative
from specctl.drafters.base import Drafter
from specctl.drafters.draft_model import DraftModel
from specctl.drafters.fast_rule import kernel_token_rule
from specctl.drafters.ngram import NgramDrafter
from specctl.events import Event
from specctl.models.backend import Module
from specctl.models.llama import Llama
from specctl.models.session import CausalModel, Forward
from specctl.models.threads import within
from specctl.sampling import SamplingLaw
from specctl.stopping import StopRules


class Fresh(Protocol):
    """A model without a cache."""

    def __call__(self, ids: Tensor, num_logits: int | None = None, /) -> Forward:
        """Logits [B, N, V] and hidden states [B, N, D] of the last `num_logits` of ids [B, T]; of all if None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that `speculative()` is given beside prompt, K, chance and stops.

    draft_law: what the draft draws from. draw: how the target is drawn from where nothing was drafted.
    around: what stands around each round, as in decoding that is no test.
    """

    target: CausalModel
    drafter: Drafter
    law: SamplingLaw
    draft_law: SamplingLaw
    rule: Rule
    device: torch.device
    draw: Draw = step_by_step
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def drafts_in_kernel(self) -> bool:
        return isinstance(self.drafter, DraftModel) and self.drafter.draw is by_session

    @property
    def judges_in_kernel(self) -> bool:
        return self.rule is kernel_token_rule

    @property
    def path(self) -> str:
        """Which of the drawing and the judging runs in the kernel."""
        draws = self.draw is by_session or self.drafts_in_kernel
        fast = [name for name, is_fast in (("draws", draws), ("rule", self.judges_in_kernel)) if is_fast]
        return f"{' and '.join(fast)} in the kernel" if fast else "step by step"

    def step_by_step(self) -> "Parts":
        """The same through torch alone, draw by draw, where every question to a chance can be heard."""
        return self._drawing(step_by_step, step_by_step, token_rule if self.judges_in_kernel else self.rule)

    def under(self, law: SamplingLaw) -> "Parts":
        """The same under another law of target and draft, drawn from as that allows."""
        draft = self.drafter.model if isinstance(self.drafter, DraftModel) else self.target
        drawing = self._drawing(draw_with(self.target, law), draw_with(draft, law), self.rule)
        return replace(drawing, law=law, draft_law=law)

    def _drawing(self, draw: Draw, draft_draw: Draw, rule: Rule) -> "Parts":
        drafter = self.drafter.drawing_with(draft_draw) if isinstance(self.drafter, DraftModel) else self.drafter
        return replace(self, drafter=drafter, draw=draw, rule=rule)

    def events(
        self, prompt: Sequence[int], *, k: int, chance: Chance, num_tokens: int, observer: Observer | None = None
    ) -> Iterator[Event]:
        """One request that ends at its budget or at the context alone; plain decoding, unobserved, for K = 0."""
        stop = StopRules(max_new_tokens=num_tokens)
        if k == 0:
            return within(
                self.around,
                plain(self.target, prompt, law=self.law, chance=chance, stop=stop, device=self.device, draw=self.draw),
            )
        return within(
            self.around,
            speculative(
                self.target,
                self.drafter,
                prompt,
                num_speculative_tokens=k,
                law=self.law,
                draft_law=self.draft_law,
                chance=chance,
                stop=stop,
                rule=self.rule,
                device=self.device,
                observer=observer,
                draw=self.draw,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Parts to verify, and what they are held against.

    clean: without any bug. parts: what runs; the same where nothing is planted.
    fresh_target, fresh_draft: the models of `clean`, cache-less; None for a drafter that is no draft model.
    tolerance: how far a probability may be from that of a fresh forward by rounding alone.
    """

    clean: Parts
    parts: Parts
    fresh_target: Fresh
    fresh_draft: Fresh | None
    tolerance: float

    @property
    def draws(self) -> bool:
        """Whether the drafter draws its tokens; a copy from the text is none."""
        return not isinstance(self.clean.drafter, NgramDrafter)


def subject(
    parts: Parts, *, fresh_target: Fresh | None = None, fresh_draft: Fresh | None = None, dtype: torch.dtype
) -> Subject:
    """A subject without a bug; forwards that are not given go through sessions that start empty."""
    draft = parts.drafter.model if isinstance(parts.drafter, DraftModel) else None
    if fresh_draft is None and draft is not None:
        fresh_draft = through_empty_session(draft)
    return Subject(
        clean=parts,
        parts=parts,
        fresh_target=fresh_target or through_empty_session(parts.target),
        fresh_draft=fresh_draft,
        tolerance=tolerance(dtype, min(parts.law.temperature, parts.draft_law.temperature)),
    )


def tolerance(dtype: torch.dtype, temperature: float) -> float:
    """How far two probabilities of one token may be apart because passes of different width sum in another order.

    A change d of a logit changes a probability by p (1 - p) d / temperature at most. Logits of some tens carry
    rounding of about 1e-5 in float32 after some layers, and of 2^-8 of their size in bfloat16.
    """
    rounding = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 5e-2)
    return rounding / min(1.0, temperature or 1.0)


def through_empty_session(model: CausalModel) -> Fresh:
    """The whole prefix in one pass of a session that has seen nothing."""

    def fresh(ids: Tensor, num_logits: int | None = None) -> Forward:
        passes = [model.session().extend(row[None], num_logits) for row in ids]
        return Forward(torch.cat([each.logits for each in passes]), torch.cat([each.hidden for each in passes]))

    return fresh


def through_module(module: Module, dtype: torch.dtype, device: torch.device, vocab_size: int) -> Fresh:
    """The module that is trained and saved: it shares no line with the decoder and has no cache at all.

    vocab_size: columns of the logits that are kept; what is left out is padding. A model behind transformers is
    itself, without its cache.
    """
    weight = module.lm_head.weight if isinstance(module, Llama) else None
    fits = weight is None or (weight.device, weight.dtype) == (device, dtype)
    own = module.eval() if fits else copy.deepcopy(module).to(device, dtype).eval()

    @torch.inference_mode()
    def fresh(ids: Tensor, num_logits: int | None = None) -> Forward:
        rows = slice(ids.shape[1] - num_logits if num_logits else 0, None)
        if isinstance(own, Llama):
            hidden = own.states(ids)[:, rows]
            return Forward(own.lm_head(hidden)[..., :vocab_size], hidden)
        forward: Forward = own(ids)
        return Forward(forward.logits[:, rows, :vocab_size], forward.hidden[:, rows])

    return fresh
