"""Tiny models whose law is known exactly, misbehaving drafts, and the exact laws to hold results to.

Everything is float64 unless said; a model answers `logits_after(prefix)` without a cache, so that the
law of a continuation is computed by a path that shares nothing with the decoding loop.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from specctl.acceptance import Proposal
from specctl.chance import Chance, enumerate_branches
from specctl.drafters.base import DenseProposal, PointProposal
from specctl.drafters.draft_model import DraftModel
from specctl.events import Event, Round
from specctl.models.llama import Llama, LlamaShape
from specctl.models.llama_decoder import LlamaDecoder
from specctl.models.session import Capabilities, CausalModel, Forward, Session
from specctl.sampling import History, SamplingLaw

CPU = torch.device("cpu")


class Oracle(CausalModel, Protocol):
    """A model that also answers without a cache."""

    def logits_after(self, prefix: Sequence[int]) -> Tensor:
        """Logits [V] of the token after a prefix."""


class FakeModel:
    """A model given by a function from the prefix to logits [V]."""

    capabilities = Capabilities()

    def __init__(
        self,
        logits_after: Callable[[Sequence[int]], Tensor],
        vocab_size: int,
        name: str = "target",
        context_length: int = 1_000_000,
    ) -> None:
        self.logits_after, self.vocab_size, self.name, self.context_length = (
            logits_after,
            vocab_size,
            name,
            context_length,
        )

    def session(self, batch_size: int = 1) -> Session:
        assert batch_size == 1
        return FakeSession(self)


class FakeSession:
    """Remembers the ids it has seen; its cache is that list."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self._ids: list[int] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        return (len(self._ids),)

    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        new_ids = ids[0].tolist()
        assert new_ids, "an empty pass"
        rows = []
        for token_id in new_ids:
            self._ids.append(token_id)
            rows.append(self._model.logits_after(self._ids))
        assert len(self._ids) <= self._model.context_length, "beyond the context"
        logits = torch.stack(rows)[None, -(num_logits or len(rows)) :]
        return Forward(logits, torch.zeros(1, logits.shape[1], 1))

    def keep(self, lengths: tuple[int, ...]) -> None:
        assert 0 <= lengths[0] <= len(self._ids)
        del self._ids[lengths[0] :]


def const(probs: Sequence[float], name: str = "target", context_length: int = 1_000_000) -> FakeModel:
    """CONST: one distribution, whatever the context."""
    logits = torch.tensor(probs, dtype=torch.float64).log()
    return FakeModel(lambda prefix: logits, len(probs), name, context_length)


def markov(rows: Sequence[Sequence[float]], name: str = "target", context_length: int = 1_000_000) -> FakeModel:
    """MARKOV: the next token depends on the last one only."""
    logits = torch.tensor(rows, dtype=torch.float64).log()
    return FakeModel(lambda prefix: logits[prefix[-1]], len(rows), name, context_length)


def cycle(length: int, name: str = "target", context_length: int = 1_000_000) -> FakeModel:
    """CYCLE: 0, 1, .., length - 1, 0, .. with certainty."""
    return markov(torch.eye(length).roll(1, dims=1).tolist(), name, context_length)


class Tiny:
    """A random Llama: the cached decoder for the loop, the module itself for the oracle."""

    capabilities = Capabilities()

    def __init__(self, module: Llama, name: str = "target", dtype: torch.dtype = torch.float64) -> None:
        self.module = module.to(dtype).eval()
        self._decoder = LlamaDecoder(module, name, dtype=dtype, device=CPU)
        self.name = name
        self.vocab_size = self._decoder.vocab_size
        self.context_length = self._decoder.context_length

    def session(self, batch_size: int = 1) -> Session:
        return self._decoder.session(batch_size)

    def logits_after(self, prefix: Sequence[int]) -> Tensor:
        return self.rows_after(prefix)[-1]

    def rows_after(self, prefix: Sequence[int]) -> Tensor:
        """Logits [T, V] at every position of the prefix, without a cache."""
        with torch.inference_mode():
            return self.module(torch.tensor([list(prefix)])).logits[0]


def llama_shape(**sizes: object) -> LlamaShape:
    """A small shape; `sizes` override it."""
    defaults: dict[str, object] = {
        "vocab_size": 3,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 16,
        "rope_theta": 100.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return LlamaShape(**{**defaults, **sizes})  # type: ignore[arg-type]


def random_llama(seed: int, scale: float = 0.5, **sizes: object) -> Llama:
    """A Llama with weights large enough that every layer, norm and position is heard in the logits."""
    module = Llama(llama_shape(**sizes)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(noise * scale if weight.dim() == 2 else 1 + 0.2 * noise)
    return module


def history(seed: int = 0, name: str = "target") -> Tiny:
    """HISTORY: a random 2-layer Llama with V = 3, whose law depends on the whole prefix."""
    return Tiny(random_llama(seed), name)


class Points:
    """A drafter that proposes with certainty: `choose(tokens so far)` at every step."""

    def __init__(self, choose: Callable[[Sequence[int]], int], vocab_size: int, name: str = "points") -> None:
        self._choose, self._vocab_size, self.name = choose, vocab_size, name

    def begin(self, prompt: Sequence[int], forward: Forward | None) -> None:
        pass

    def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal:
        token_ids = list(history.token_ids)
        for _ in range(limit):
            token_ids.append(self._choose(token_ids))
        drafted = token_ids[len(history.token_ids) :]
        return PointProposal(torch.tensor(drafted, dtype=torch.int64), self._vocab_size)

    def observe(self, round_: Round, forward: Forward) -> None:
        pass


def eoser(end_token: int, vocab_size: int) -> Points:
    """EOSER: always proposes the end token."""
    return Points(lambda token_ids: end_token, vocab_size, "eoser")


def self_draft(target: CausalModel) -> DraftModel:
    """SELF: the target as its own draft."""
    return DraftModel(target, "self")


def wrong_model(target: Tiny) -> Tiny:
    """WRONG: the target with its logits negated, so that its favourite is the target's last choice."""
    module = Llama(target.module.shape).to(target.module.lm_head.weight.dtype)
    module.load_state_dict(target.module.state_dict())
    with torch.no_grad():
        module.lm_head.weight.neg_()
    return Tiny(module, "wrong", module.lm_head.weight.dtype)


class Cutting:
    """Stops a draft early at the token `at`: keeping it in the proposal, or (a planted bug) withholding it."""

    def __init__(self, draft: DraftModel, at: int, withhold: bool) -> None:
        self._draft, self._at, self._withhold, self.name = draft, at, withhold, draft.name

    def begin(self, prompt: Sequence[int], forward: Forward | None) -> None:
        self._draft.begin(prompt, forward)

    def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal:
        proposal = self._draft.propose(history, limit, law, chance)
        ids = proposal.ids.tolist()
        if self._at not in ids:
            return proposal
        length = ids.index(self._at) + (not self._withhold)
        rows = [proposal.row(torch.tensor(i)) for i in range(length)]
        nothing = torch.zeros_like(proposal.row(torch.tensor(len(ids))))
        return DenseProposal(proposal.ids[:length], torch.stack([*rows, nothing]))

    def observe(self, round_: Round, forward: Forward) -> None:
        self._draft.observe(round_, forward)


class Misdeclared:
    """A planted bug: drafts its model's favourite, but declares the softmax as what it was drawn from."""

    name = "misdeclared"

    def __init__(self, probs: Sequence[float]) -> None:
        self._probs = torch.tensor(probs, dtype=torch.float64)

    def begin(self, prompt: Sequence[int], forward: Forward | None) -> None:
        pass

    def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal:
        ids = self._probs.argmax().repeat(limit)
        q = torch.cat([self._probs.repeat(limit, 1), torch.zeros(1, len(self._probs), dtype=torch.float64)])
        return DenseProposal(ids, q)

    def observe(self, round_: Round, forward: Forward) -> None:
        pass


class Recording:
    """A model that remembers the sessions it opened, so that a test can look into their caches."""

    def __init__(self, model: CausalModel, wrap: Callable[[Session], Session] = lambda session: session) -> None:
        self._model, self._wrap = model, wrap
        self.name, self.vocab_size, self.context_length = model.name, model.vocab_size, model.context_length
        self.sessions: list[Session] = []

    def session(self, batch_size: int = 1) -> Session:
        self.sessions.append(self._wrap(self._model.session(batch_size)))
        return self.sessions[-1]


class Clock:
    """Stands for `perf_counter` in modules of specctl: nothing takes any time but what is slowed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self._now = 0.0
        for module in modules:
            monkeypatch.setattr(f"specctl.{module}.perf_counter", lambda: self._now)

    def slowed(self, function: Callable[..., Any], seconds: Callable[..., float] | float) -> Callable[..., Any]:
        """The function, taking so long, or as long as `seconds` says of its arguments."""

        def slow(*arguments: Any, **options: Any) -> Any:
            self._now += seconds(*arguments, **options) if callable(seconds) else seconds
            return function(*arguments, **options)

        return slow


def law_of(
    model: Oracle, prompt: Sequence[int], num_tokens: int, law: SamplingLaw | None = None
) -> dict[tuple[int, ...], float]:
    """The exact probability of every continuation of `num_tokens` tokens, by cache-less evaluation."""
    law = law or SamplingLaw()
    result: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for continuation, probability in result.items():
            prefix = [*prompt, *continuation]
            probs = law.probs(model.logits_after(prefix), History(token_ids=prefix, prompt_length=len(prompt)))
            for token_id, p in enumerate(probs.tolist()):
                longer[(*continuation, token_id)] = probability * p
        result = longer
    return result


def emitted(events: Iterator[Event]) -> tuple[int, ...]:
    """All token ids that a run emitted."""
    return tuple(itertools.chain.from_iterable(event.emitted for event in events if isinstance(event, Round)))


def enumerated_law(run: Callable[[Chance], Iterator[Event]]) -> dict[tuple[int, ...], float]:
    """The exact law of what `run` emits, by walking every branch of its randomness."""
    result: dict[tuple[int, ...], float] = {}
    for probability, tokens in enumerate_branches(lambda chance: emitted(run(chance))):
        result[tokens] = result.get(tokens, 0.0) + probability
    return result


def max_error(found: dict[tuple[int, ...], float], expected: dict[tuple[int, ...], float]) -> float:
    """The largest difference of two laws over all outcomes of either."""
    return max(abs(found.get(tokens, 0.0) - expected.get(tokens, 0.0)) for tokens in {*found, *expected})
