"""The native decoder: the Llama architecture, for training and for decoding.

`Llama` is the module that is trained and saved; its parameters carry the names of Hugging Face's
LlamaForCausalLM. `LlamaDecoder` lays the same weights out for decoding and opens sessions.
Sources: Touvron et al. 2302.13971 (architecture), Su et al. 2104.09864 (rotary positions),
Shazeer 2002.05202 (SwiGLU), Ainslie et al. 2305.13245 (grouped-query attention).

Shapes: B sequences, T tokens, V vocab, D width, F feed-forward width, H heads, Hkv key-value heads,
Hd head dim. Knows nothing about sampling, text or files.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.models.kv_cache import KVCache
from specctl.models.session import Forward


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The sizes of a model, under their Hugging Face names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool


def rotary_table(shape: LlamaShape, dtype: torch.dtype) -> Tensor:
    """exp(i position frequency), [max_position_embeddings, Hd / 2] complex."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.arange(shape.max_position_embeddings, dtype=torch.float64)[:, None] * shape.rope_theta**-exponent
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    return torch.polar(torch.ones_like(angles), angles).to(complex_dtype)


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        query_width = shape.num_attention_heads * shape.head_dim
        kv_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)  # [B, heads, T, Hd]

        q = _rotate(heads(self.q_proj(x)), cos, sin)
        k = _rotate(heads(self.k_proj(x)), cos, sin)
        y = F.scaled_dot_product_attention(q, k, heads(self.v_proj(x)), is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + Hd/2]) of [B, heads, T, Hd] by the angles [T, Hd/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class FeedForward(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dropout: float) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(attended, dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), dropout, self.training)


class Backbone(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Llama(nn.Module):
    """The module to train and to save. `dropout` acts on the residual branches in training mode."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = 0.0
        with torch.random.fork_rng(devices=[]):  # torch's own initial values draw from the global generator
            self.model = Backbone(shape)
            self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def initialise(self, seed: int) -> None:
        """Random weights: normal with deviation 0.02, residual outputs scaled by 1 / sqrt(2 layers)."""
        generator = torch.Generator().manual_seed(seed)
        residual_scale = (2 * self.shape.num_hidden_layers) ** -0.5
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() == 2:
                    scale = residual_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02 * scale)

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.parameters())

    def forward(self, ids: Tensor) -> Forward:
        """Logits [B, T, V] and hidden states [B, T, D] for ids [B, T], without a cache."""
        weight = self.model.embed_tokens.weight
        table = rotary_table(self.shape, weight.dtype)[: ids.shape[1]].to(weight.device)
        cos, sin = table.real.to(weight.dtype), table.imag.to(weight.dtype)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, self.dropout)
        hidden = self.model.norm(x)
        return Forward(self.lm_head(hidden), hidden)


class LlamaDecoder:
    """The weights of a `Llama` laid out for decoding; a `CausalModel`.

    What differs from the module, none of it in the logits beyond rounding: q, k and v, and gate and
    up, are one matrix each; the norms' weights are folded into the matrix that follows; matrices are
    stored [in, out], which costs nearly the same for 1 and for 8 rows; and rows of q and k are
    ordered so that a rotated pair is adjacent and one complex product rotates them.
    """

    def __init__(self, module: Llama, name: str, *, dtype: torch.dtype, device: torch.device) -> None:
        self.name, self.shape, self.dtype, self.device = name, module.shape, dtype, device
        shape = module.shape

        def lay_out(weight: Tensor, norm: Tensor | None = None) -> Tensor:
            weight = weight.detach().to(torch.float64)  # [out, in]
            if norm is not None:
                weight = weight * norm.detach().to(torch.float64)
            return weight.t().to(device, dtype).contiguous()  # [in, out]

        backbone = module.model
        self.embedding = backbone.embed_tokens.weight.detach().to(device, dtype)  # [V, D]
        self.layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for layer in backbone.layers:
            assert isinstance(layer, Layer)
            attention, feed_forward = layer.self_attn, layer.mlp
            qk = [_pair_up(projection.weight, shape.head_dim) for projection in (attention.q_proj, attention.k_proj)]
            qkv = torch.cat([*qk, attention.v_proj.weight])
            gate_up = torch.cat([feed_forward.gate_proj.weight, feed_forward.up_proj.weight])
            self.layers.append(
                (
                    lay_out(qkv, layer.input_layernorm.weight),
                    lay_out(attention.o_proj.weight),
                    lay_out(gate_up, layer.post_attention_layernorm.weight),
                    lay_out(feed_forward.down_proj.weight),
                )
            )
        self.norm_weight = backbone.norm.weight.detach().to(device, dtype)
        self.lm_head = lay_out(module.lm_head.weight)  # [D, V]
        # Values turn by 1, so that q, k and v pass through one product: [S, H + 2 Hkv, Hd / 2].
        table = rotary_table(shape, dtype)[:, None].expand(
            -1, shape.num_attention_heads + shape.num_key_value_heads, -1
        )
        still = torch.ones_like(table[:, : shape.num_key_value_heads])
        self.rotary = torch.cat([table, still], dim=1).to(device).contiguous()

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def context_length(self) -> int:
        return self.shape.max_position_embeddings

    def session(self, batch_size: int = 1) -> "LlamaSession":
        return LlamaSession(self, batch_size)


def _pair_up(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder rows [heads * Hd, D] within each head from halves (0, Hd/2, ...) to adjacent pairs."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


class LlamaSession:
    """A `LlamaDecoder` and its cache for B equally long sequences; a `Session`."""

    def __init__(self, decoder: LlamaDecoder, batch_size: int) -> None:
        shape = decoder.shape
        self._decoder = decoder
        self._cache = KVCache(
            num_layers=shape.num_hidden_layers,
            batch_size=batch_size,
            num_key_value_heads=shape.num_key_value_heads,
            capacity=shape.max_position_embeddings,
            head_dim=shape.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._cache.length,) * self._cache.batch_size

    def keep(self, lengths: tuple[int, ...]) -> None:
        self._cache.keep(lengths)

    @torch.inference_mode()
    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        decoder, shape = self._decoder, self._decoder.shape
        batch, length = ids.shape
        start, end = self._cache.reserve(length)
        rotary = decoder.rotary[start:end]  # [T, H + 2 Hkv, Hd / 2]
        mask = _causal_mask(start, end, decoder) if length > 1 else None
        x = F.embedding(ids, decoder.embedding).view(batch * length, -1)  # [B T, D]
        for index, (qkv_weight, out_weight, gate_up_weight, down_weight) in enumerate(decoder.layers):
            qkv = _turn(_normalise(x, shape.rms_norm_eps) @ qkv_weight, rotary, batch, shape.head_dim)
            q, kv = qkv.split((shape.num_attention_heads, 2 * shape.num_key_value_heads), dim=1)
            self._cache.layers[index][:, :, start:end] = kv
            keys, values = self._cache.layer(index, end)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)  # [B, H, T, Hd]
            x = torch.addmm(x, y.transpose(1, 2).reshape(batch * length, -1), out_weight)
            gate, up = (_normalise(x, shape.rms_norm_eps) @ gate_up_weight).chunk(2, dim=1)
            x = torch.addmm(x, F.silu(gate).mul_(up), down_weight)
        x = x.view(batch, length, -1)
        if num_logits is not None and num_logits != length:
            x = x[:, length - num_logits :]
        hidden = _normalise(x, shape.rms_norm_eps) * decoder.norm_weight
        return Forward(hidden @ decoder.lm_head, hidden)


def _turn(qkv: Tensor, rotary: Tensor, batch: int, head_dim: int) -> Tensor:
    """Rotate q and k of a fused product [B T, (H + 2 Hkv) Hd]; return [B, H + 2 Hkv, T, Hd]."""
    length, num_heads, half = rotary.shape
    single = torch.float64 if rotary.dtype == torch.complex128 else torch.float32
    pairs = torch.view_as_complex(qkv.view(batch, length, num_heads, half, 2).to(single))
    turned = torch.view_as_real(pairs * rotary).view(batch, length, num_heads, head_dim)
    return turned.to(qkv.dtype).transpose(1, 2)


def _normalise(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis.

    A LayerNorm of (x, -x), whose mean is zero, is an RMSNorm of x in two small ops instead of five.
    """
    width = x.shape[-1]
    return F.layer_norm(torch.cat((x, -x), dim=-1), (2 * width,), eps=eps)[..., :width]


def _causal_mask(start: int, end: int, decoder: LlamaDecoder) -> Tensor:
    """What is added to scores [T, end]: 0 where a row may look, -inf at later positions."""
    mask = torch.full((end - start, end), -torch.inf, dtype=decoder.dtype, device=decoder.device)
    return mask.triu_(start + 1)
