"""The Llama architecture as a module, for training and for files.

Its parameters carry the names of Hugging Face's LlamaForCausalLM; `llama_decoder.py` lays the same
weights out for decoding. Biases and norms of q and k make it Qwen2's and Qwen3's too.
Sources: Touvron et al. 2302.13971 (architecture), Su et al. 2104.09864 (rotary positions),
Shazeer 2002.05202 (SwiGLU), Ainslie et al. 2305.13245 (grouped-query attention), Henry et al. 2010.04245
(norms of q and k), Chen et al. 2306.15595 and Grattafiori et al. 2407.21783 (longer contexts).

Shapes: B sequences, T tokens, V vocab, D width, F feed-forward width, H heads, Hkv key-value heads,
Hd head dim. Knows nothing about sampling, text or files.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.models.session import Forward


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies were slowed down for a context longer than the trained one.

    linear: every one is divided by `factor`. llama3: those with fewer than `low_freq_factor` turns in the
    original context are, those with more than `high_freq_factor` stay, and between the two it is blended.
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The sizes of a model, under their Hugging Face names, and the switches in which the families differ."""

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
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def rotary_frequencies(shape: LlamaShape) -> Tensor:
    """Radians a position by which each pair turns, [Hd / 2] float64."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    frequencies, scaling = shape.rope_theta**-exponent, shape.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = blend.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotary_table(shape: LlamaShape, dtype: torch.dtype, length: int | None = None) -> Tensor:
    """exp(i position frequency) for the first `length` positions (all if None), [length, Hd / 2] complex."""
    positions = torch.arange(shape.max_position_embeddings if length is None else length, dtype=torch.float64)
    angles = positions[:, None] * rotary_frequencies(shape)
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    return torch.polar(torch.ones_like(angles), angles).to(complex_dtype)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B, H, T, Hd], k and v [B, Hkv, T, Hd] -> [B, H, T, Hd]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each token to itself and those before it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        query_width = shape.num_attention_heads * shape.head_dim
        kv_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_width, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=shape.o_bias)
        norm = partial(nn.RMSNorm, shape.head_dim, eps=shape.rms_norm_eps) if shape.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)  # [B, heads, T, Hd]

        q = _rotate(self.q_norm(heads(self.q_proj(x))), cos, sin)
        k = _rotate(self.k_norm(heads(self.k_proj(x))), cos, sin)
        y = attend(q, k, heads(self.v_proj(x)))
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + Hd/2]) of [B, heads, T, Hd] by the angles [T, Hd/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class FeedForward(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dropout: float = 0.0, attend: Attend = causal) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, attend)
        x = x + F.dropout(attended, dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), dropout, self.training)


class Backbone(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        # Zeros, since torch's own normal values take seconds and 80 MB of imports to make on the meta device.
        nothing = torch.zeros(shape.vocab_size, shape.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(nothing, freeze=False)
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
        self.tie()

    def tie(self) -> None:
        """Make one parameter of two matrices that the shape ties; needed again where either was replaced."""
        if self.shape.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def initialise(self, seed: int) -> None:
        """Random weights: normal with deviation 0.02, residual outputs scaled by 1 / sqrt(2 layers); biases zero."""
        generator = torch.Generator().manual_seed(seed)
        residual_scale = (2 * self.shape.num_hidden_layers) ** -0.5
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() == 2:
                    scale = residual_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02 * scale)
                elif name.endswith(".bias"):
                    weight.zero_()

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.parameters())

    def forward(self, ids: Tensor) -> Forward:
        """Logits [B, T, V] and hidden states [B, T, D] for ids [B, T], without a cache."""
        hidden = self.states(ids)
        return Forward(self.lm_head(hidden), hidden)

    def states(self, ids: Tensor) -> Tensor:
        """The hidden states [B, T, D] alone."""
        assert ids.shape[1] <= self.shape.max_position_embeddings
        weight = self.model.embed_tokens.weight
        table = rotary_table(self.shape, weight.dtype, ids.shape[1]).to(weight.device)
        cos, sin = table.real.to(weight.dtype), table.imag.to(weight.dtype)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, self.dropout)
        states: Tensor = self.model.norm(x)
        return states
