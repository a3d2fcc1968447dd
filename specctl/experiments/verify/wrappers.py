"""Wrapped parts that do something wrong: what the planted bugs are made of.

Each wraps a model's session, a drafter, a way to draw, a rule, a law or a chance, and leaves the decoding loop alone.
What wraps a way to draw or a rule calls the real one, and bends what it is given or gives back: so the kernel's too.
Knows nothing of what sees it.

Shapes: K drafted, V vocab.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import cast

import torch
from torch import Tensor

from specctl.acceptance import Proposal, Verdict
from specctl.chance import Chance, SeededChance
from specctl.continuation import Draw
from specctl.decoding import Rule
from specctl.drafters.base import DenseProposal, Drafter
from specctl.events import Round
from specctl.models.kernel.decoder import KernelDecoder
from specctl.models.llama_decoder import LlamaDecoder
from specctl.models.session import CausalModel, DrawingSession, Drawn, Forward, Session
from specctl.sampling import History, SamplingLaw

Bend = Callable[[Tensor], Tensor]  # weights [V] -> weights [V]
Closing = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # p, q, rejected id, p of the last row -> weights [V]


class BentDrafter:
    """A drafter whose tokens are drawn from other weights than it declares."""

    def __init__(self, drafter: Drafter, bend: Bend) -> None:
        self._drafter, self._bend, self.name = drafter, bend, drafter.name

    def begin(self, prompt: Sequence[int], forward: Forward | None) -> None:
        self._drafter.begin(prompt, forward)

    def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal:
        return self._drafter.propose(history, limit, law, _BentChance(chance, self._bend))

    def observe(self, round_: Round, forward: Forward) -> None:
        self._drafter.observe(round_, forward)


class _BentChance:
    def __init__(self, chance: Chance, bend: Bend) -> None:
        self._chance, self._bend = chance, bend

    def begin_round(self, index: int) -> None:
        self._chance.begin_round(index)

    def successes(self, probs: Tensor) -> Tensor:
        return self._chance.successes(probs)

    def draw(self, weights: Tensor) -> Tensor:
        return self._chance.draw(self._bend(weights))


class WithholdingDrafter:
    """A drafter that ends its proposal before the first token that it dislikes: one of the upper half of the ids."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.name = drafter, drafter.name

    def begin(self, prompt: Sequence[int], forward: Forward | None) -> None:
        self._drafter.begin(prompt, forward)

    def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal:
        proposal = self._drafter.propose(history, limit, law, chance)
        positions = torch.arange(len(proposal.ids) + 1, device=proposal.ids.device)
        rows = torch.stack([proposal.row(position) for position in positions])
        disliked = (proposal.ids >= rows.shape[1] // 2).nonzero()[:1, 0].tolist()
        if not disliked:
            return proposal
        kept = disliked[0]
        return DenseProposal(proposal.ids[:kept], torch.cat((rows[:kept], torch.zeros_like(rows[:1]))))

    def observe(self, round_: Round, forward: Forward) -> None:
        self._drafter.observe(round_, forward)


class _NoDraw:
    """Lets a rule decide how many drafts stay, and leaves the closing draw to somebody else."""

    def __init__(self, chance: Chance) -> None:
        self.begin_round, self.successes = chance.begin_round, chance.successes

    def draw(self, weights: Tensor) -> Tensor:
        return weights.new_zeros(1, dtype=torch.int64)


def closing_with(rule: Rule, weights_of: Closing) -> Rule:
    """The rule, with the token after a rejection drawn from other weights (from p where they are all zero)."""

    def wrong(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
        verdict = rule(p, proposal, _NoDraw(chance))
        position = verdict.num_accepted
        law = weights = p[int(position)]
        if position < len(proposal.ids):
            weights = weights_of(law, proposal.row(position), proposal.ids[int(position)], p[-1])
        closing = chance.draw(weights if weights.sum() > 0 else law)
        return Verdict(position, closing, verdict.health)

    return wrong


def without_bonus(rule: Rule) -> Rule:
    """The rule, with the last draft of a fully accepted round as its closing token, and nothing after it."""

    def wrong(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
        verdict = rule(p, proposal, chance)
        if len(proposal.ids) == 0 or verdict.num_accepted < len(proposal.ids):
            return verdict
        return Verdict(verdict.num_accepted - 1, proposal.ids[-1:], verdict.health)

    return wrong


class _BentUniforms(SeededChance):
    """A chance whose uniforms are those of another, bent."""

    def __init__(self, chance: Chance, bend: Bend) -> None:
        assert isinstance(chance, SeededChance)
        self._chance, self._bend = chance, bend

    def uniforms(self, count: int) -> Tensor:
        return self._bend(self._chance.uniforms(count))


def _first_alone(uniforms: Tensor) -> Tensor:
    return uniforms[:1].repeat(len(uniforms))


def from_one_uniform(draw: Draw) -> Draw:
    """The draw, with all tokens of a call from the first one's uniform."""

    def wrong(
        session: Session,
        feed: Tensor,
        count: int,
        *,
        law: SamplingLaw,
        history: History,
        chance: Chance,
        keep_logits: bool = False,
    ) -> Drawn:
        one = _BentUniforms(chance, _first_alone)
        return draw(session, feed, count, law=law, history=history, chance=one, keep_logits=keep_logits)

    return wrong


def at_another_temperature(draw: Draw) -> Draw:
    """The draw at a third of the temperature, with the rows of the temperature that was asked for."""

    def wrong(
        session: Session,
        feed: Tensor,
        count: int,
        *,
        law: SamplingLaw,
        history: History,
        chance: Chance,
        keep_logits: bool = False,
    ) -> Drawn:
        cold = replace(law, temperature=law.temperature / 3)
        drawn = draw(session, feed, count, law=cold, history=history, chance=chance, keep_logits=keep_logits)
        if drawn.probs is None:
            return drawn
        declared = drawn.probs[:-1] ** (1 / 3)
        declared /= declared.sum(1, keepdim=True)
        mass = declared.gather(1, drawn.ids[:, None])[:, 0]
        return replace(drawn, probs=torch.cat((declared, drawn.probs[-1:])), mass=mass)

    return wrong


def closing_replaced(rule: Rule) -> Rule:
    """The rule, with its token after a rejection replaced by one that is drawn from p."""

    def wrong(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
        verdict = rule(p, proposal, chance)
        position = int(verdict.num_accepted)
        return verdict if position == len(proposal.ids) else verdict._replace(closing=chance.draw(p[position]))

    return wrong


def with_one_uniform(rule: Rule) -> Rule:
    """The rule, with its closing draw and all its tests from the uniform of the first test."""
    return lambda p, proposal, chance: rule(p, proposal, _BentUniforms(chance, _first_alone))


def with_row_before(rule: Rule) -> Rule:
    """The rule, with each draft judged by the q of the one before it, and the first by none."""

    def wrong(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
        if isinstance(proposal, DenseProposal):
            proposal = DenseProposal(proposal.ids, proposal.q.roll(1, 0))
        return rule(p, proposal, chance)

    return wrong


class BlindLaw(SamplingLaw):
    """A law whose penalties do not see drafted tokens where it is asked about several rows, as for the target."""

    __slots__ = ()

    def probs(self, logits: Tensor, history: History) -> Tensor:
        if logits.dim() == 1:
            return SamplingLaw.probs(self, logits, history)
        blind = History(token_ids=history.token_ids, prompt_length=history.prompt_length)
        return torch.stack([SamplingLaw.probs(self, row, blind) for row in logits])


def blinded(law: SamplingLaw) -> SamplingLaw:
    return BlindLaw(**{field.name: getattr(law, field.name) for field in fields(law)})


class WrappedModel:
    """A model whose sessions are wrapped."""

    def __init__(self, model: CausalModel, wrap: Callable[[Session], Session]) -> None:
        self._model, self._wrap = model, wrap
        self.name, self.vocab_size, self.context_length = model.name, model.vocab_size, model.context_length
        self.capabilities = model.capabilities

    def session(self, batch_size: int = 1) -> Session:
        return self._wrap(self._model.session(batch_size))


class StaleSession:
    """A session in which a rollback puts the first rejected draft in the place of the last token kept."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ids: list[int] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._session.lengths

    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        self._ids += ids[0].tolist()
        self._device = ids.device
        return self._session.extend(ids, num_logits)

    def draw(self, feed: Tensor, count: int, temperature: float, uniforms: Tensor) -> Drawn:
        drawn = cast(DrawingSession, self._session).draw(feed, count, temperature, uniforms)
        self._ids += [*feed[0].tolist(), *drawn.ids[:-1].tolist()]
        self._device = feed.device
        return drawn

    def keep(self, lengths: tuple[int, ...]) -> None:
        (kept,) = lengths
        if 0 < kept < len(self._ids):
            stale = torch.tensor([[self._ids[kept]]], device=self._device)
            self._session.keep((kept - 1,))
            self._session.extend(stale)
        else:
            self._session.keep(lengths)
        del self._ids[kept:]


class HoledSession:
    """A draft's session that misses the last draft of a fully accepted round: another token stands in its place."""

    def __init__(self, session: Session, vocab_size: int) -> None:
        self._session, self._vocab_size = session, vocab_size
        self.keep = session.keep

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._session.lengths

    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        return self._session.extend(self._holed(ids), num_logits)

    def draw(self, feed: Tensor, count: int, temperature: float, uniforms: Tensor) -> Drawn:
        return cast(DrawingSession, self._session).draw(self._holed(feed), count, temperature, uniforms)

    def _holed(self, ids: Tensor) -> Tensor:
        if ids.shape[1] == 2 and self.lengths[0] > 0:  # what a draft reads after a fully accepted round
            return torch.cat(((ids[:, :1] + 1) % self._vocab_size, ids[:, 1:]), 1)
        return ids


class ShiftingModel:
    """A Llama whose positions are one too high from the first rollback of a session on."""

    def __init__(self, decoder: KernelDecoder | LlamaDecoder) -> None:
        self._decoder = decoder
        self.name, self.vocab_size, self.context_length = decoder.name, decoder.vocab_size, decoder.context_length
        self.capabilities = decoder.capabilities

    def session(self, batch_size: int = 1) -> Session:
        own = copy.copy(self._decoder)
        return _ShiftingSession(own, own.session(batch_size))


class _ShiftingSession:
    def __init__(self, decoder: KernelDecoder | LlamaDecoder, session: Session) -> None:
        self._decoder, self._session, self._shifted = decoder, session, False
        self.extend = session.extend

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._session.lengths

    def draw(self, feed: Tensor, count: int, temperature: float, uniforms: Tensor) -> Drawn:
        return cast(DrawingSession, self._session).draw(feed, count, temperature, uniforms)

    def keep(self, lengths: tuple[int, ...]) -> None:
        if lengths < self.lengths and not self._shifted:
            rotary = self._decoder.rotary
            self._decoder.rotary, self._shifted = torch.cat((rotary[1:], rotary[-1:])), True
        self._session.keep(lengths)
