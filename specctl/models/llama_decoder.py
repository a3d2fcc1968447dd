"""The native decoder: the weights of a `Llama` laid out for decoding, and its sessions.

What differs from the module, none of it in the logits beyond rounding: q, k and v, and gate and up,
are one matrix each; the norms' weights, the root of the width that a norm multiplies with and the
scale of attention are folded into the matrices; each matrix lies as `matrix.py` finds fastest; rows
of q and k are ordered so that a rotated pair is adjacent and one complex product rotates it. A pass
over T tokens is a list of steps bound once to buffers of that size: in steady state nothing but the
attention scores and the results is allocated.

Shapes: B sequences, T tokens, N = B T rows, V vocab, D width, F feed-forward width, H heads, Hkv
key-value heads, G = H / Hkv, Hd head dim, S positions. Knows nothing about sampling, text or files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.models.kv_cache import KVCache
from specctl.models.llama import Layer, Llama, LlamaShape, rotary_table
from specctl.models.matrix import Bound, Matrix, fastest_block
from specctl.models.session import Forward

_LONGEST_KEPT_PASS = 64  # tokens; longer passes read prompts, each of its own length
_LONGEST_SCORED = 16  # tokens; above, attention is left to a kernel that never holds all scores


@dataclass(slots=True)
class LayerMatrices:
    """qkv [D, (H + 2 Hkv) Hd], out [H Hd, D], gate_up [D, 2 F], down [F, D]."""

    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix


class LlamaDecoder:
    """A `CausalModel`. threads: CPU threads of its passes; None leaves them as they are."""

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
        self._passes: dict[tuple[int, int], _Pass] = {}

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

    def layouts(self) -> dict[str, int]:
        """The block of each kind of matrix, as `lay_out` takes it."""
        layer = self.layers[0]
        kinds = {name: getattr(layer, name).block for name in LayerMatrices.__slots__}
        return {**kinds, "lm_head": self.lm_head.block}

    def fastest_layouts(self) -> dict[str, int]:
        """What `lay_out` should be given on this machine with the threads that are set, found by timing."""
        kinds = {name: [getattr(layer, name) for layer in self.layers] for name in LayerMatrices.__slots__}
        with torch.inference_mode():
            return {name: fastest_block(matrices) for name, matrices in {**kinds, "lm_head": [self.lm_head]}.items()}

    def lay_out(self, blocks: dict[str, int]) -> None:
        """Lay every matrix out anew; block sizes by kind."""
        for layer in self.layers:
            for name in LayerMatrices.__slots__:
                setattr(layer, name, getattr(layer, name).laid_out(blocks[name]))
        self.lm_head = self.lm_head.laid_out(blocks["lm_head"])
        self._passes.clear()

    def steps(self, batch_size: int, length: int) -> "_Pass":
        """The pass over `length` new tokens of each sequence."""
        found = self._passes.get((batch_size, length))
        if found is None:
            found = _Pass(self, batch_size, length)
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


class _Pass:
    """The layers' steps over N = B T rows, bound to buffers that every pass of this size uses again."""

    def __init__(self, decoder: LlamaDecoder, batch: int, length: int) -> None:
        shape, self._embedding, self._length = decoder.shape, decoder.embedding, length
        rows, heads, kv_heads = batch * length, shape.num_attention_heads, shape.num_key_value_heads
        groups = heads // kv_heads

        def buffer(*sizes: int, dtype: torch.dtype = decoder.dtype) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=decoder.device)

        self._x = buffer(rows, shape.hidden_size)  # the residual stream
        self._normalised = buffer(rows, shape.hidden_size)
        self._normalise = _Norm(self._x, self._normalised, shape.rms_norm_eps)
        qkv = buffer(rows, (heads + 2 * kv_heads) * shape.head_dim)
        self._turn = _Turn(qkv.view(batch, length, heads + 2 * kv_heads, shape.head_dim), heads, kv_heads)
        attended = buffer(rows, heads * shape.head_dim)
        attend = _Scored if length <= _LONGEST_SCORED else _Fused
        self._attend = attend(self._turn.q, attended.view(batch, length, kv_heads, groups, shape.head_dim))
        self._norm_qk: list[Bound] = []
        if shape.qk_norm:
            qk = qkv.view(rows, -1, shape.head_dim)[:, : heads + kv_heads]
            norm = _Norm(qk, qk, shape.rms_norm_eps)
            self._norm_qk = [_scaled_norm(norm, qk, weight) for weight in decoder.qk_norms]
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
            for layer in decoder.layers
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
