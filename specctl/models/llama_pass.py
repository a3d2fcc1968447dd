"""One pass of the native decoder: a list of steps bound once to buffers of its size.

A pass over T tokens is always the same operations on the same memory, so in steady state nothing but the
attention scores and the results is allocated. q and k arrive with rotated pairs adjacent, and one complex
product rotates them into the place where attention reads them; the scale of attention is in q already.

Shapes: B sequences, T tokens, N = B T rows, V vocab, D width, F feed-forward width, H heads, Hkv key-value
heads, G = H / Hkv, Hd head dim, S positions. Knows nothing about where weights come from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.models.kv_cache import KVCache
from specctl.models.llama import LlamaShape
from specctl.models.matrix import Bound, Matrix

_LONGEST_SCORED = 16  # tokens; above, attention is left to a kernel that never holds all scores


@dataclass(slots=True)
class LayerMatrices:
    """qkv [D, (H + 2 Hkv) Hd], out [H Hd, D], gate_up [D, 2 F], down [F, D]."""

    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix


class Pass:
    """The layers' steps over N = B T rows, bound to buffers that every pass of this size uses again."""

    def __init__(
        self,
        shape: LlamaShape,
        layers: Sequence[LayerMatrices],
        qk_norms: Sequence[Tensor],
        embedding: Tensor,
        *,
        batch_size: int,
        length: int,
    ) -> None:
        """embedding: [V, D], whose dtype and device are the pass's. qk_norms: [H + Hkv, Hd] a layer, or none."""
        self._embedding, self._length = embedding, length
        rows, heads, kv_heads = batch_size * length, shape.num_attention_heads, shape.num_key_value_heads
        groups = heads // kv_heads

        def buffer(*sizes: int) -> Tensor:
            return embedding.new_empty(sizes)

        self._x = buffer(rows, shape.hidden_size)  # the residual stream
        self._normalised = buffer(rows, shape.hidden_size)
        self._normalise = _Norm(self._x, self._normalised, shape.rms_norm_eps)
        qkv = buffer(rows, (heads + 2 * kv_heads) * shape.head_dim)
        self._turn = _Turn(qkv.view(batch_size, length, heads + 2 * kv_heads, shape.head_dim), heads, kv_heads)
        attended = buffer(rows, heads * shape.head_dim)
        attend = _Scored if length <= _LONGEST_SCORED else _Fused
        self._attend = attend(self._turn.q, attended.view(batch_size, length, kv_heads, groups, shape.head_dim))
        self._norm_qk: list[Bound] = []
        if shape.qk_norm:
            qk = qkv.view(rows, -1, shape.head_dim)[:, : heads + kv_heads]
            norm = _Norm(qk, qk, shape.rms_norm_eps)
            self._norm_qk = [_scaled_norm(norm, qk, weight) for weight in qk_norms]
        gate_up, activated = buffer(rows, 2 * shape.intermediate_size), buffer(rows, shape.intermediate_size)
        gate, up = gate_up.chunk(2, dim=1)

        def activate() -> None:
            torch.mul(F.silu(gate), up, out=activated)

        self._layers: list[tuple[Bound, Bound, Bound, Callable[[], None], Bound]] = [
            (
                layer.qkv.into(self._normalised, qkv),
                layer.out.onto(attended, self._x),
                layer.gate_up.into(self._normalised, gate_up),
                activate,
                layer.down.onto(activated, self._x),
            )
            for layer in layers
        ]

    def run(self, ids: Tensor, cache: KVCache, rotary: Tensor) -> Tensor:
        """Hidden states [N, D] before the final norm's weight, in a buffer that the next pass overwrites."""
        start, end = cache.reserve(self._length)
        self._turn.begin(rotary[start:end])
        self._attend.begin(start, end)
        torch.index_select(self._embedding, 0, ids.view(-1), out=self._x)
        parts = zip(self._layers, cache.slots(start, end), cache.keys(end), cache.values(end), strict=True)
        for index, (steps, slots, keys, values) in enumerate(parts):
            to_qkv, add_attended, to_gate_up, activate, add_activated = steps
            self._normalise()
            to_qkv()
            if self._norm_qk:
                self._norm_qk[index]()
            self._turn(slots)
            self._attend(keys, values)
            add_attended()
            self._normalise()
            to_gate_up()
            activate()
            add_activated()
        return self._normalise()


class _Norm:
    """Writes x / |(x, sqrt(D eps))| over the last axis into `out`: the root mean square norm of x [..., D] but for the
    factor sqrt(D), which whatever follows holds.
    """

    def __init__(self, x: Tensor, out: Tensor, eps: float) -> None:
        self._x, self._out = x, out
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        self._norms = torch.empty(*x.shape[:-1], 1, dtype=dtype, device=x.device)
        self._least = torch.full_like(self._norms, (x.shape[-1] * eps) ** 0.5)

    def __call__(self) -> Tensor:
        torch.linalg.vector_norm(self._x, 2, -1, True, dtype=self._norms.dtype, out=self._norms)
        torch.hypot(self._norms, self._least, out=self._norms)
        return torch.div(self._x, self._norms, out=self._out)


def _scaled_norm(norm: _Norm, x: Tensor, weight: Tensor) -> Bound:
    def both() -> None:
        norm()
        x.mul_(weight)

    return both


class _Turn:
    """Rotates q and k of a fused product [B, T, H + 2 Hkv, Hd] and puts each where attention reads it.

    q: [B, Hkv, G, T, Hd].
    """

    def __init__(self, qkv: Tensor, heads: int, kv_heads: int) -> None:
        batch, length, _, head_dim = qkv.shape
        self.q = qkv.new_empty(batch, kv_heads, heads // kv_heads, length, head_dim)
        self._q_slots = self.q.flatten(1, 2).transpose(1, 2)  # [B, T, H, Hd]
        self._qkv = qkv
        # There is no complex bfloat16: such a product is turned in float32 and rounded once.
        self._staged = qkv.dtype not in (torch.float32, torch.float64)
        self._wide = qkv.float() if self._staged else qkv
        pairs = _pairs(self._wide)
        self._q_pairs = pairs[:, :, :heads]
        self._kv_pairs = pairs[:, :, heads:].unflatten(2, (2, kv_heads))
        self._q_out = None if self._staged else _pairs(self._q_slots)
        self._q_rotary = self._kv_rotary = pairs

    def begin(self, rotary: Tensor) -> None:
        """rotary: [T, 2, 1, Hd / 2], of the positions of this pass: of q and k, and of values."""
        self._q_rotary, self._kv_rotary = rotary[:, 0], rotary

    def __call__(self, slots: Tensor) -> None:
        """slots: [B, T, 2, Hkv, Hd], where keys and values go."""
        if self._q_out is not None:
            torch.mul(self._q_pairs, self._q_rotary, out=self._q_out)
            torch.mul(self._kv_pairs, self._kv_rotary, out=_pairs(slots))
            return
        self._wide.copy_(self._qkv)
        self._q_slots.copy_(torch.view_as_real(self._q_pairs * self._q_rotary).flatten(-2))
        slots.copy_(torch.view_as_real(self._kv_pairs * self._kv_rotary).flatten(-2))


def _pairs(x: Tensor) -> Tensor:
    """[..., Hd] as complex [..., Hd / 2], the same memory."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


class _Scored:
    """Attention of a few rows: all scores, softmax, sum. q: [B, Hkv, G, T, Hd]; out: [B, T, Hkv, G, Hd]."""

    def __init__(self, q: Tensor, out: Tensor) -> None:
        batch, kv_heads, groups, self._length, head_dim = q.shape
        self._q = q.view(batch * kv_heads, groups * self._length, head_dim)
        self._out = out.permute(0, 2, 3, 1, 4)  # [B, Hkv, G, T, Hd]
        self._groups = groups
        self._single = out.view(self._q.shape) if self._length == 1 else None
        self._stair = q.new_zeros(0, 0)
        self._mask = self._stair

    def begin(self, start: int, end: int) -> None:
        """The mask of this pass: row t looks at positions up to start + t. A window of one stair serves every start."""
        if self._length == 1:
            return
        reach = self._stair.shape[1] - self._length  # positions in front of the stair's first row
        if start >= reach:
            reach = max(1024, 2 * start)
            stair = self._q.new_full((self._length, reach + self._length), -torch.inf).triu_(reach + 1)
            self._stair = stair.repeat(self._groups, 1)  # [G T, reach + T]
        self._mask = self._stair[:, reach - start : reach - start + end]

    def __call__(self, keys: Tensor, values: Tensor) -> None:
        """keys: [B Hkv, Hd, end]; values: [B Hkv, end, Hd]."""
        if self._single is not None:
            torch.bmm(torch.bmm(self._q, keys).softmax(-1), values, out=self._single)
            return
        scores = torch.baddbmm(self._mask, self._q, keys)  # [B Hkv, G T, end]
        self._out.copy_(torch.bmm(scores.softmax(-1), values).view(self._out.shape))


class _Fused:
    """Attention of many rows, in memory that does not grow with their square. Shapes as in `_Scored`."""

    def __init__(self, q: Tensor, out: Tensor) -> None:
        self._q, self._out = q, out
        self._mask: Tensor | None = None

    def begin(self, start: int, end: int) -> None:
        length = self._q.shape[3]
        self._mask = self._q.new_full((length, end), -torch.inf).triu_(start + 1) if start else None

    def __call__(self, keys: Tensor, values: Tensor) -> None:
        batch, kv_heads = self._q.shape[:2]
        y = F.scaled_dot_product_attention(
            self._q.flatten(1, 2),  # [B, H, T, Hd]
            keys.transpose(1, 2).unflatten(0, (batch, kv_heads)),
            values.unflatten(0, (batch, kv_heads)),
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=1.0,
            enable_gqa=True,
        )
        self._out.copy_(y.view(self._q.shape).permute(0, 3, 1, 2, 4))
