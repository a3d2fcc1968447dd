"""The Llama architecture as a module, for training and for files.

Its parameters carry the names of Hugging Face's LlamaForCausalLM; `llama_decoder.py` lays the same
weights out for decoding.
Sources: Touvron et al. 2302.13971 (architecture), Su et al. 2104.09864 (rotary positions),
Shazeer 2002.05202 (SwiGLU), Ainslie et al. 2305.13245 (grouped-query attention).

Shapes: B sequences, T tokens, V vocab, D width, F feed-forward width, H heads, Hkv key-value heads,
Hd head dim. Knows nothing about sampling, text or files.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
