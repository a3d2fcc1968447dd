"""The decoder through `torch.compile`: static shapes, one compiled step for each number of tokens a pass.

The module's own layers as one function of tensors: positions are a tensor, and attention reads a cache of a
fixed size whole, masked. So nothing about a pass changes but values, and the compiler may fuse and unroll or,
on a GPU, record a graph. A cache that is full is doubled, which compiles the steps anew. Passes that were not
warmed up, such as those over prompts, run through the same function uncompiled.

Shapes: B sequences, T tokens, S positions of the cache, V vocab, D width, Hkv key-value heads, Hd head dim.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.errors import SpecctlError, UsageError
from specctl.models.llama import Layer, Llama, rotary_table
from specctl.models.session import Capabilities, Forward

_FIRST_POSITIONS = 512
_ON_CPU = {"freezing": True}  # weights become constants, packed for each product


class CompiledLlama:
    """A `CausalModel`. threads: CPU threads of its passes; None leaves them as they are."""

    engine = "torch.compile"
    capabilities = Capabilities()

    def __init__(self, module: Llama, name: str, *, dtype: torch.dtype, device: torch.device) -> None:
        self.name, self.shape, self.dtype, self.device = name, module.shape, dtype, device
        self.threads: int | None = None
        self.lengths: set[int] = set()  # tokens of the passes that are compiled; any other runs as it is
        self.function = _Function(module).to(device, dtype).eval().requires_grad_(False)
        how: dict[str, object] = {"options": _ON_CPU} if device.type == "cpu" else {"mode": "reduce-overhead"}
        self.step: Callable[..., tuple[Tensor, Tensor]] = torch.compile(
            self.function, fullgraph=True, dynamic=False, **how
        )  # type: ignore[call-overload]

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def context_length(self) -> int:
        return self.shape.max_position_embeddings

    def session(self, batch_size: int = 1) -> "CompiledSession":
        return CompiledSession(self, batch_size)

    @torch.inference_mode()  # as the decoding loops run, or the compiler would start again in them
    def warm_up(self, lengths: Iterable[int]) -> None:
        """Compile the passes over these numbers of tokens, where they are not; it takes up to minutes.

        Raises UsageError where the compiler cannot, such as for want of one of C++.
        """
        try:
            self._warm_up(lengths)
        except RuntimeError as error:
            from torch._dynamo.exc import BackendCompilerFailed

            if not isinstance(error, BackendCompilerFailed):
                raise
            reason = str(error.inner_exception).strip().partition("\n")[0]
            raise UsageError(
                f"runtime.compile: {self.name} cannot be compiled here: {reason}; mend that, or leave it out"
            ) from error

    def _warm_up(self, lengths: Iterable[int]) -> None:
        session = self.session()
        for length in set(lengths) - self.lengths:
            self.lengths.add(length)
            for _ in range(3):  # compiled, then run, on a GPU recorded
                session.extend(torch.zeros(1, length, dtype=torch.int64, device=self.device))
                session.keep((0,))


class CompiledSession:
    """A `Session` of a compiled model: B equally long sequences in a cache of a fixed size."""

    def __init__(self, model: CompiledLlama, batch_size: int) -> None:
        self._model, self._batch_size, self._length = model, batch_size, 0
        self._cache = self._zeros(min(model.context_length, _FIRST_POSITIONS))

    def _zeros(self, positions: int) -> list[Tensor]:
        shape = self._model.shape
        sizes = (2, self._batch_size, shape.num_key_value_heads, positions, shape.head_dim)
        each = range(shape.num_hidden_layers)
        return [torch.zeros(sizes, dtype=self._model.dtype, device=self._model.device) for _ in each]

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._length,) * self._batch_size

    def keep(self, lengths: tuple[int, ...]) -> None:
        if len(set(lengths)) != 1 or len(lengths) != self._batch_size:
            raise SpecctlError(f"rows of unequal length are not supported: {lengths}")
        if not 0 <= lengths[0] <= self._length:
            raise ValueError(f"cannot keep {lengths[0]} tokens of {self._length}")
        self._length = lengths[0]

    @torch.no_grad()
    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        model, length = self._model, ids.shape[1]
        start, end = self._length, self._length + length
        if end > model.context_length:
            raise SpecctlError(f"context is full: {end} tokens, room for {model.context_length}; shorten the prompt")
        if end > (positions := self._cache[0].shape[3]):
            grown = self._zeros(min(model.context_length, max(end, 2 * positions)))
            for new, old in zip(grown, self._cache, strict=True):
                new[:, :, :, :start] = old[:, :, :, :start]
            self._cache = grown
        if model.threads is not None:
            torch.set_num_threads(model.threads)
        run = model.step if length in model.lengths else model.function
        logits, hidden = run(ids, torch.arange(start, end, device=ids.device), self._cache)
        if model.device.type != "cpu":  # a recorded graph writes to the same memory each time
            logits, hidden = logits.clone(), hidden.clone()
        self._length = end
        count = length if num_logits is None else num_logits
        return Forward(logits[:, length - count :], hidden[:, length - count :])


class _Function(nn.Module):
    """Logits [B, T, V] and hidden states [B, T, D] of tokens after those that a cache holds."""

    def __init__(self, module: Llama) -> None:
        super().__init__()
        self.module = module
        table = rotary_table(module.shape, torch.float64)
        self.register_buffer("cos", table.real.contiguous())
        self.register_buffer("sin", table.imag.contiguous())

    def forward(self, ids: Tensor, positions: Tensor, cache: list[Tensor]) -> tuple[Tensor, Tensor]:
        """ids: [B, T]; positions: [T] int64; cache: [2, B, Hkv, S, Hd] a layer, which the new tokens are written to."""
        cos, sin = self.get_buffer("cos")[positions], self.get_buffer("sin")[positions]  # [T, Hd / 2]
        seen = torch.arange(cache[0].shape[3], device=ids.device) <= positions[:, None]  # [T, S]
        x = self.module.model.embed_tokens(ids)
        for layer, stored in zip(self.module.model.layers, cache, strict=True):
            assert isinstance(layer, Layer)

            def attend(q: Tensor, k: Tensor, v: Tensor, stored: Tensor = stored) -> Tensor:
                stored.index_copy_(3, positions, torch.stack((k, v)))
                return F.scaled_dot_product_attention(q, stored[0], stored[1], attn_mask=seen, enable_gqa=True)

            x = layer(x, cos, sin, attend=attend)
        hidden = self.module.model.norm(x)
        return self.module.lm_head(hidden), hidden
