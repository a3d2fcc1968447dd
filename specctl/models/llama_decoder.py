"""The native decoder: the weights of a `Llama` laid out for decoding, and its sessions.

What differs from the module, none of it in the logits beyond rounding: q, k and v, and gate and up,
are one matrix each; the norms' weights, the root of the width that a norm multiplies with and the
scale of attention are folded into the matrices; and rows of q and k are ordered so that a rotated pair is
adjacent. What a pass does is `llama_pass.py`'s. For GPUs, for float64, and where `kernel` cannot be had.

Shapes: B sequences, T tokens, N = B T rows, V vocab, D width, F feed-forward width, H heads, Hkv
key-value heads, G = H / Hkv, Hd head dim, S positions. Knows nothing about sampling, text or files.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from specctl.models.kv_cache import cache_for
from specctl.models.llama import Layer, Llama, LlamaShape, rotary_table
from specctl.models.llama_pass import LayerMatrices, Pass
from specctl.models.matrix import Matrix
from specctl.models.session import Capabilities, Forward

_LONGEST_KEPT_PASS = 64  # tokens; longer passes read prompts, each of its own length


class LlamaDecoder:
    """A `CausalModel`. threads: CPU threads of its passes; None leaves them as they are."""

    engine = "torch"
    capabilities = Capabilities()

    def __init__(
        self, module: Llama, name: str, *, dtype: torch.dtype, device: torch.device, use_up: bool = False
    ) -> None:
        """use_up: let go of each of the module's weights once it is laid out, so that they are held once."""
        self.name, self.shape, self.dtype, self.device = name, module.shape, dtype, device
        self.threads: int | None = None
        backbone = module.model

        def move(weight: Tensor) -> Tensor:
            return weight.detach().to(device, dtype)

        self.embedding = move(backbone.embed_tokens.weight)  # [V, D]
        self.lm_head = Matrix(move(module.lm_head.weight.t()))  # [D, V]; the largest goes first, while least is copied
        self.norm_weight = move(_wide(backbone.norm.weight) * module.shape.hidden_size**0.5)
        if use_up:
            _empty(module.lm_head)
        self.layers: list[LayerMatrices] = []
        self.qk_norms: list[Tensor] = []  # [H + Hkv, Hd] a layer; none where q and k have no norms
        for layer in backbone.layers:
            assert isinstance(layer, Layer)
            matrices, qk_norm = _fused(layer, module.shape, move)
            self.layers.append(matrices)
            if qk_norm is not None:
                self.qk_norms.append(qk_norm)
            if use_up:
                _empty(layer)
        table = rotary_table(module.shape, dtype)[:, None, None]
        # Values turn by 1, so that k and v pass through one product: [S, 2, 1, Hd / 2].
        self.rotary = torch.cat([table, torch.ones_like(table)], dim=1).to(device)
        self._passes: dict[tuple[int, int], Pass] = {}

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def context_length(self) -> int:
        return self.shape.max_position_embeddings

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that a pass reads: all but the embedding."""
        matrices = [getattr(layer, name) for layer in self.layers for name in LayerMatrices.__slots__]
        return sum(matrix.num_bytes for matrix in (*matrices, self.lm_head))

    def session(self, batch_size: int = 1) -> "LlamaSession":
        return LlamaSession(self, batch_size)

    def steps(self, batch_size: int, length: int) -> "Pass":
        """The pass over `length` new tokens of each sequence."""
        found = self._passes.get((batch_size, length))
        if found is None:
            found = Pass(self.shape, self.layers, self.qk_norms, self.embedding, batch_size=batch_size, length=length)
            if length <= _LONGEST_KEPT_PASS:
                self._passes[batch_size, length] = found
        return found


def _fused(layer: Layer, shape: LlamaShape, move: Callable[[Tensor], Tensor]) -> tuple[LayerMatrices, Tensor | None]:
    """A layer's matrices with norms and scales folded in, and the norms of q and k, [H + Hkv, Hd], if it has them."""
    attention, feed_forward, head_dim = layer.self_attn, layer.mlp, shape.head_dim
    root, scale = shape.hidden_size**0.5, head_dim**-0.5

    def fuse(linears: Sequence[nn.Linear], parts: Sequence[Callable[[Tensor], Tensor]], norm: nn.RMSNorm) -> Matrix:
        """Linears side by side, each changed row by row; the norm before them folded in."""
        weight = torch.cat([part(_wide(linear.weight)) for part, linear in zip(parts, linears, strict=True)])
        weight *= _wide(norm.weight) * root
        biases = [
            part(_wide(linear.bias)) for part, linear in zip(parts, linears, strict=True) if linear.bias is not None
        ]
        return Matrix(move(weight.t()), move(torch.cat(biases)) if biases else None)

    def alone(linear: nn.Linear) -> Matrix:
        return Matrix(move(linear.weight.t()), None if linear.bias is None else move(linear.bias))

    def same(rows: Tensor) -> Tensor:
        return rows

    def pair_up(rows: Tensor) -> Tensor:
        """Within each head, from halves (0, Hd / 2, ...) to adjacent pairs; rows: [heads * Hd, ...]."""
        return rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def scaled(rows: Tensor) -> Tensor:
        return pair_up(rows) if shape.qk_norm else pair_up(rows) * scale

    qk_norm = None
    if shape.qk_norm:
        q = pair_up(_wide(attention.q_norm.get_parameter("weight"))) * scale
        k = pair_up(_wide(attention.k_norm.get_parameter("weight")))
        heads = q.expand(shape.num_attention_heads, -1), k.expand(shape.num_key_value_heads, -1)
        qk_norm = move(torch.cat(heads) * head_dim**0.5)
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    matrices = LayerMatrices(
        qkv=fuse(projections, (scaled, pair_up, same), layer.input_layernorm),
        out=alone(attention.o_proj),
        gate_up=fuse((feed_forward.gate_proj, feed_forward.up_proj), (same, same), layer.post_attention_layernorm),
        down=alone(feed_forward.down_proj),
    )
    return matrices, qk_norm


def _empty(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.data = weight.data.new_empty(0)


def _wide(weight: Tensor) -> Tensor:
    """In float32 at least, so that folding rounds once."""
    weight = weight.detach()
    return weight if weight.dtype == torch.float64 else weight.float()


class LlamaSession:
    """A `LlamaDecoder` and its cache for B equally long sequences; a `Session`."""

    def __init__(self, decoder: LlamaDecoder, batch_size: int) -> None:
        self._decoder = decoder
        self._cache = cache_for(decoder.shape, batch_size, decoder.dtype, decoder.device)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._cache.length,) * self._cache.batch_size

    def keep(self, lengths: tuple[int, ...]) -> None:
        self._cache.keep(lengths)

    @torch.inference_mode()
    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        decoder = self._decoder
        if decoder.threads is not None:
            torch.set_num_threads(decoder.threads)
        batch, length = ids.shape
        steps = decoder.steps(batch, length)
        x = steps.run(ids, self._cache, decoder.rotary)  # [N, D], normalised
        if num_logits is not None and num_logits != length:
            x = x.view(batch, length, -1)[:, length - num_logits :].reshape(batch * num_logits, -1)
        hidden = x * decoder.norm_weight
        logits = decoder.lm_head(hidden)
        return Forward(logits.view(batch, -1, decoder.vocab_size), hidden.view(batch, -1, decoder.shape.hidden_size))
