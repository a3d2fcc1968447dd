"""Tiny models in float64 whose exact law can be computed: what the enumeration runs on.

CONST: one law whatever the context. MARKOV: the next token depends on the last one. HISTORY: a random
2-layer Llama, whose law depends on the whole prefix, so that it notices a wrong cache or position.

Shapes: T tokens, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from specctl.acceptance import token_rule
from specctl.decoding import Rule
from specctl.drafters.base import Drafter
from specctl.drafters.draft_model import DraftModel
from specctl.drafters.medusa import MedusaDrafter
from specctl.drafters.ngram import NgramDrafter
from specctl.experiments.verify.subject import Parts, Subject, subject, through_module
from specctl.models.llama import Llama, LlamaShape
from specctl.models.llama_decoder import LlamaDecoder
from specctl.models.medusa import MedusaDecoder, MedusaHeads, MedusaShape
from specctl.models.session import Capabilities, Forward, Session
from specctl.sampling import SamplingLaw

ToyTarget = Literal["CONST", "MARKOV", "HISTORY"]
ToyDrafter = Literal["draft_model", "medusa", "ngram"]

_CPU = torch.device("cpu")
_TARGET_ROWS = {
    2: ((0.3, 0.7), (0.8, 0.2)),
    3: ((0.1, 0.6, 0.3), (0.5, 0.2, 0.3), (0.25, 0.25, 0.5)),
}
_DRAFT_ROWS = {
    2: ((0.0, 1.0), (0.25, 0.75)),  # a certain row keeps the branches of K = 4 few
    3: ((0.7, 0.1, 0.2), (0.1, 0.3, 0.6), (0.8, 0.1, 0.1)),
}


def _random_rows(seed: int, vocab_size: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((vocab_size, vocab_size), generator=generator, dtype=torch.float64)
    rows: list[list[float]] = torch.softmax(logits, -1).tolist()
    return rows


class TableModel:
    """A model whose logits [V] depend on the last token alone; a `CausalModel`."""

    capabilities = Capabilities()

    def __init__(self, rows: Sequence[Sequence[float]], name: str) -> None:
        self.name, self.vocab_size, self.context_length = name, len(rows), 1_000_000
        self.logits = torch.tensor(rows, dtype=torch.float64).log()  # [V, V]

    def session(self, batch_size: int = 1) -> Session:
        return _TableSession(self.logits, batch_size)


class _TableSession:
    def __init__(self, logits: Tensor, batch_size: int) -> None:
        self._logits, self.lengths = logits, (0,) * batch_size

    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        self.lengths = tuple(length + ids.shape[1] for length in self.lengths)
        logits = self._logits[ids][:, -(num_logits or ids.shape[1]) :]
        return Forward(logits, logits)

    def keep(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths


def random_llama(seed: int, vocab_size: int) -> Llama:
    """Weights so large that every layer, norm and position is heard in the logits."""
    module = Llama(
        LlamaShape(
            vocab_size=vocab_size,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            max_position_embeddings=64,
            rope_theta=100.0,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        )
    ).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(0.5 * noise if weight.dim() == 2 else 1 + 0.2 * noise)
    return module.eval()


def _decoder(module: Llama, name: str) -> LlamaDecoder:
    return LlamaDecoder(module, name, dtype=torch.float64, device=_CPU)


def _heads(shape: LlamaShape, num_heads: int = 4) -> MedusaDecoder:
    heads = MedusaHeads(
        MedusaShape(
            num_heads=num_heads, num_hidden_layers=1, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size
        )
    ).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return MedusaDecoder(heads, dtype=torch.float64, device=_CPU)


def _drafter(kind: ToyDrafter, target: ToyTarget, vocab_size: int, shape: LlamaShape) -> Drafter:
    if kind == "ngram":
        return NgramDrafter(minimum=1, maximum=2, vocab_size=vocab_size)
    if kind == "medusa":
        return MedusaDrafter(_heads(shape), "medusa")
    if target == "HISTORY":
        return DraftModel(_decoder(random_llama(1, vocab_size), "draft"), "draft")
    return DraftModel(TableModel(_DRAFT_ROWS.get(vocab_size) or _random_rows(1, vocab_size), "draft"), "draft")


def toy(
    target: ToyTarget,
    drafter: ToyDrafter = "draft_model",
    *,
    vocab_size: int = 3,
    rule: Rule = token_rule,
    law: SamplingLaw | None = None,
) -> Subject:
    """A toy pair, exact as far as it is built; Medusa heads need HISTORY's hidden states."""
    law = law or SamplingLaw()
    module = random_llama(0, vocab_size)
    rows = _TARGET_ROWS.get(vocab_size) or _random_rows(0, vocab_size)
    models: dict[ToyTarget, Callable[[], TableModel | LlamaDecoder]] = {
        "CONST": lambda: TableModel((rows[0],) * vocab_size, "target"),
        "MARKOV": lambda: TableModel(rows, "target"),
        "HISTORY": lambda: _decoder(module, "target"),
    }
    parts = Parts(
        target=models[target](),
        drafter=_drafter(drafter, target, vocab_size, module.shape),
        law=law,
        draft_law=law,
        rule=rule,
        device=_CPU,
    )
    fresh = through_module(module, torch.float64, _CPU, vocab_size) if target == "HISTORY" else None
    return subject(parts, fresh_target=fresh, dtype=torch.float64)


def with_law(tested: Subject, law: SamplingLaw) -> Subject:
    """The same pair under another law of target and draft."""
    clean = tested.clean.under(law)
    return replace(tested, clean=clean, parts=clean)
