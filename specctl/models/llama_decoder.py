"""The native decoder: the weights of a `Llama` laid out for decoding, and its sessions.

Shapes: B sequences, T tokens, V vocab, D width, F feed-forward width, H heads, Hkv key-value heads,
Hd head dim. Knows nothing about sampling, text or files.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.models.kv_cache import KVCache
from specctl.models.llama import Layer, Llama, rotary_table
from specctl.models.session import Forward

Linear = tuple[Tensor, Tensor | None]  # weight [in, out], bias [out]


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

        def move(weight: Tensor) -> Tensor:
            return weight.detach().to(device, dtype)

        backbone = module.model
        self.embedding = backbone.embed_tokens.weight.detach().to(device, dtype)  # [V, D]
        self.layers: list[tuple[Linear, Linear, Linear, Linear]] = []
        self.qk_norms: list[Tensor] = []  # [H + Hkv, Hd] a layer, none without norms of q and k
        for layer in backbone.layers:
            assert isinstance(layer, Layer)
            attention, feed_forward = layer.self_attn, layer.mlp
            qk = [_pair_up(projection.weight, shape.head_dim) for projection in (attention.q_proj, attention.k_proj)]
            qkv = torch.cat([*qk, attention.v_proj.weight])
            gate_up = torch.cat([feed_forward.gate_proj.weight, feed_forward.up_proj.weight])
            qkv_bias = o_bias = gate_up_bias = down_bias = None
            if shape.qkv_bias:
                qk = [_pair_up(projection.bias, shape.head_dim) for projection in (attention.q_proj, attention.k_proj)]
                qkv_bias = move(torch.cat([*qk, attention.v_proj.bias]))
            if shape.o_bias:
                o_bias = move(attention.o_proj.bias)
            if shape.mlp_bias:
                gate_up_bias = move(torch.cat([feed_forward.gate_proj.bias, feed_forward.up_proj.bias]))
                down_bias = move(feed_forward.down_proj.bias)
            if shape.qk_norm:
                norms = (
                    (attention.q_norm, shape.num_attention_heads),
                    (attention.k_norm, shape.num_key_value_heads),
                )
                weights = [_pair_up(norm.get_parameter("weight"), shape.head_dim).expand(n, -1) for norm, n in norms]
                self.qk_norms.append(move(torch.cat(weights)))
            self.layers.append(
                (
                    (lay_out(qkv, layer.input_layernorm.weight), qkv_bias),
                    (lay_out(attention.o_proj.weight), o_bias),
                    (lay_out(gate_up, layer.post_attention_layernorm.weight), gate_up_bias),
                    (lay_out(feed_forward.down_proj.weight), down_bias),
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
    """Reorder rows [heads * Hd, ...] within each head from halves (0, Hd/2, ...) to adjacent pairs."""
    return weight.view(-1, 2, head_dim // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


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
        for index, (to_qkv, (out_weight, out_bias), to_gate_up, (down_weight, down_bias)) in enumerate(decoder.layers):
            qkv = _linear(_normalise(x, shape.rms_norm_eps), to_qkv)
            if shape.qk_norm:
                qk = qkv.view(batch * length, -1, shape.head_dim)[:, : -shape.num_key_value_heads]
                qk.copy_(_normalise(qk, shape.rms_norm_eps) * decoder.qk_norms[index])
            qkv = _turn(qkv, rotary, batch, shape.head_dim)
            q, kv = qkv.split((shape.num_attention_heads, 2 * shape.num_key_value_heads), dim=1)
            self._cache.layers[index][:, :, start:end] = kv
            keys, values = self._cache.layer(index, end)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)  # [B, H, T, Hd]
            x = torch.addmm(x, y.transpose(1, 2).reshape(batch * length, -1), out_weight)
            x = x if out_bias is None else x + out_bias
            gate, up = _linear(_normalise(x, shape.rms_norm_eps), to_gate_up).chunk(2, dim=1)
            x = torch.addmm(x, F.silu(gate).mul_(up), down_weight)
            x = x if down_bias is None else x + down_bias
        x = x.view(batch, length, -1)
        if num_logits is not None and num_logits != length:
            x = x[:, length - num_logits :]
        hidden = _normalise(x, shape.rms_norm_eps) * decoder.norm_weight
        return Forward(hidden @ decoder.lm_head, hidden)


def _linear(x: Tensor, linear: Linear) -> Tensor:
    weight, bias = linear
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


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
