"""A decoder whose passes are one call of the kernel: the weights laid out for it, and its sessions.

On a CPU. Computes in float32. Weights are held as bfloat16 where that is asked for, and also where nothing
is lost by it: a matrix whose every weight is a bfloat16 number, as in most published checkpoints, gives the
same bits in half the bytes.

A token's logits do not depend on what else is in its pass, down to the last bit (`pass.cpp` says why).

Shapes: B sequences, T tokens, V vocab, D width, F feed-forward width, H heads, Hkv key-value heads, Hd head dim.
Knows nothing about sampling, text or files.
"""

import copy
import ctypes
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_double, c_float, c_int64, c_void_p

import torch
from torch import Tensor, nn

from specctl.hardware import num_cores
from specctl.models.kernel import library
from specctl.models.kv_cache import KVCache
from specctl.models.llama import Layer, Llama, LlamaShape, rotary_table
from specctl.models.session import Forward

_BLOCK = 16  # columns of a block of weights
_KEYS = 32  # positions of a block of keys
_ALIGNED = 64  # bytes
_DTYPES = (torch.float32, torch.bfloat16)


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("is_half", c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("feed_forward_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", _Matrix),
        ("out", _Matrix),
        ("gate_up", _Matrix),
        ("down", _Matrix),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("num_layers", c_int64),
        ("width", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("feed_forward", c_int64),
        ("vocab_size", c_int64),
        ("epsilon", c_float),
        ("score_scale", c_float),
        ("layers", c_void_p),
        ("embedding", c_void_p),
        ("embedding_is_half", c_int64),
        ("norm", c_void_p),
        ("rotary", c_void_p),
        ("lm_head", _Matrix),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        ("ids", c_void_p),
        ("batch", c_int64),
        ("length", c_int64),
        ("start", c_int64),
        ("num_logits", c_int64),
        ("threads", c_int64),
        ("cache", c_void_p),
        ("positions", c_int64),
        ("hidden", c_void_p),
        ("logits", c_void_p),
    )


class _Draws(ctypes.Structure):
    _fields_ = (
        ("count", c_int64),
        ("temperature", c_double),
        ("uniforms", c_void_p),
        ("ids", c_void_p),
    )


def why_not_kernel(
    shape: LlamaShape, dtype: torch.dtype, device: torch.device, narrate: Callable[[str], None] = lambda line: None
) -> str | None:
    """Why the kernel cannot run such a model here, or None where it can; it is built first if it is not, and told."""
    if device.type != "cpu":
        return "the kernel runs on a CPU"
    if dtype not in _DTYPES:
        return "the kernel computes in float32"
    if shape.hidden_size % 8 or shape.intermediate_size % 8 or shape.head_dim % _BLOCK:
        return "the kernel takes widths that are multiples of 8 and a head dim that is one of 16"
    try:
        if not library.is_built():
            narrate("building the kernel for this processor, once; it takes seconds")
        library.load()
    except library.KernelUnavailable as error:
        return str(error)
    return None


class KernelDecoder:
    """A `CausalModel`. threads: of its passes; None takes all cores. dtype: bfloat16 rounds the weights to it."""

    engine = "kernel"

    def __init__(self, module: Llama, name: str, *, dtype: torch.dtype, use_up: bool = False) -> None:
        """use_up: let go of each of the module's weights once it is laid out, so that they are held once.

        Raises KernelUnavailable where there is no kernel; ask `why_not_kernel` first.
        """
        self.name, self.shape, self.dtype, self.device = name, module.shape, dtype, torch.device("cpu")
        self.vocab_size = module.shape.vocab_size
        self.threads: int | None = None
        self.pass_bytes = 0  # of weights that a pass reads: all but an embedding of its own
        self.kernel = library.load()
        self._memory = _Memory(sum(_held_bytes(weight) for weight in module.parameters()))
        shape, backbone = module.shape, module.model
        lm_head = self._matrix([module.lm_head])
        tied = module.lm_head.weight is backbone.embed_tokens.weight
        embedding = None if tied else _narrowed(backbone.embed_tokens.weight.detach(), dtype)
        if use_up:
            _empty(module.lm_head)
        layers = (_Layer * shape.num_hidden_layers)()
        for index, layer in enumerate(backbone.layers):
            assert isinstance(layer, Layer)
            layers[index] = self._layer(layer)
            if use_up:
                _empty(layer)
        self._layers = layers
        self._model = _Model(
            num_layers=shape.num_hidden_layers,
            width=shape.hidden_size,
            num_heads=shape.num_attention_heads,
            num_kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            feed_forward=shape.intermediate_size,
            vocab_size=shape.vocab_size,
            epsilon=shape.rms_norm_eps,
            score_scale=shape.head_dim**-0.5,
            layers=ctypes.addressof(layers),
            embedding=None if embedding is None else self._memory.hold(embedding),
            embedding_is_half=embedding is not None and embedding.dtype == torch.bfloat16,
            norm=self._floats(backbone.norm.weight),
            lm_head=lm_head,
        )
        table = rotary_table(shape, torch.float32)
        self.rotary = torch.stack((table.real, table.imag), 1)

    @property
    def rotary(self) -> Tensor:
        """Cosines and sines of each position, [context, 2, Hd / 2] float32."""
        return self._rotary

    @rotary.setter
    def rotary(self, table: Tensor) -> None:
        self._rotary = table.contiguous()
        self._model = _Model.from_buffer_copy(self._model)
        self._model.rotary = self._rotary.data_ptr()

    def trimmed(self, vocab_size: int) -> "KernelDecoder":
        """The same weights over the first `vocab_size` tokens, no more than there are."""
        other = copy.copy(self)
        other.vocab_size = vocab_size
        other._model = _Model.from_buffer_copy(self._model)
        other._model.vocab_size = other._model.lm_head.columns = vocab_size
        return other

    @property
    def context_length(self) -> int:
        return self.shape.max_position_embeddings

    def session(self, batch_size: int = 1) -> "KernelSession":
        return KernelSession(self, batch_size)

    @property
    def address(self) -> int:
        """Where the kernel finds the model."""
        return ctypes.addressof(self._model)

    def _layer(self, layer: Layer) -> _Layer:
        attention, feed_forward = layer.self_attn, layer.mlp
        q_norm, k_norm = attention.q_norm, attention.k_norm
        return _Layer(
            attention_norm=self._floats(layer.input_layernorm.weight),
            feed_forward_norm=self._floats(layer.post_attention_layernorm.weight),
            q_norm=self._floats(q_norm.weight) if isinstance(q_norm, nn.RMSNorm) else None,
            k_norm=self._floats(k_norm.weight) if isinstance(k_norm, nn.RMSNorm) else None,
            qkv=self._matrix([attention.q_proj, attention.k_proj, attention.v_proj]),
            out=self._matrix([attention.o_proj]),
            gate_up=self._matrix([feed_forward.gate_proj, feed_forward.up_proj], alternate=True),
            down=self._matrix([feed_forward.down_proj]),
        )

    def _matrix(self, linears: Sequence[nn.Linear], alternate: bool = False) -> _Matrix:
        """Linears side by side, or block by block in turn. Each of them is padded to whole blocks."""
        blocks = [_blocks(linear.weight.detach()) for linear in linears]
        weight = torch.stack(blocks, 1).flatten(0, 1) if alternate else torch.cat(blocks)  # [blocks, 16, in]
        bias = None
        if linears[0].bias is not None:
            biases = [_blocks(linear.bias.detach()) for linear in linears]
            bias = (torch.stack(biases, 1) if alternate else torch.cat(biases)).flatten()
        weight = _narrowed(weight, self.dtype)
        is_half, (count, _, width) = weight.dtype == torch.bfloat16, weight.shape
        if is_half:  # columns j and j + 8 side by side
            weight = weight.view(count, 2, 8, width).transpose(1, 2).flatten(1, 2)
        weight = weight.transpose(1, 2)  # [blocks, in, 16]
        self.pass_bytes += weight.nbytes
        columns = count * _BLOCK if len(linears) > 1 else linears[0].out_features
        return _Matrix(
            weight=self._memory.hold(weight),
            bias=None if bias is None else self._floats(bias),
            rows=width,
            columns=columns,
            is_half=is_half,
        )

    def _floats(self, values: Tensor) -> int:
        return self._memory.hold(values.detach().float())


class _Memory:
    """Room for weights in one piece, on large pages where the system has them: that many fewer addresses to look up."""

    def __init__(self, num_bytes: int) -> None:
        self._map, self._used = mmap.mmap(-1, num_bytes), 0
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system may have none
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def hold(self, tensor: Tensor) -> int:
        """The address of a copy, valid as long as this memory."""
        room = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        room.view(tensor.shape).copy_(tensor)
        self._used += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        return room.data_ptr()


def _held_bytes(weight: Tensor) -> int:
    """The most that a parameter takes: float32, in whole blocks."""
    rows = -(-len(weight) // _BLOCK) * _BLOCK
    return -(-rows * weight[0].numel() * 4 // _ALIGNED) * _ALIGNED


def _blocks(rows: Tensor) -> Tensor:
    """[out, ...] as [ceil(out / 16), 16, ...], padded with zeros."""
    padding = -len(rows) % _BLOCK
    if padding:
        rows = torch.cat((rows, rows.new_zeros(padding, *rows.shape[1:])))
    return rows.unflatten(0, (-1, _BLOCK))


def _narrowed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """In bfloat16 where that is asked for or loses nothing, else in float32."""
    narrow = weight.to(torch.bfloat16)
    return narrow if dtype == torch.bfloat16 or torch.equal(narrow.to(weight.dtype), weight) else weight.float()


def _empty(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.data = weight.data.new_empty(0)


class KernelSession:
    """A `KernelDecoder` and its cache for B equally long sequences; a `Session`."""

    def __init__(self, decoder: KernelDecoder, batch_size: int) -> None:
        shape = decoder.shape
        self._decoder = decoder
        self._cache = KVCache(
            num_layers=shape.num_hidden_layers,
            batch_size=batch_size,
            num_key_value_heads=shape.num_key_value_heads,
            capacity=shape.max_position_embeddings,
            head_dim=shape.head_dim,
            dtype=torch.float32,
            device=decoder.device,
            block=_KEYS,
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._cache.length,) * self._cache.batch_size

    def keep(self, lengths: tuple[int, ...]) -> None:
        self._cache.keep(lengths)

    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        batch, length = ids.shape
        count = length if num_logits is None else num_logits
        hidden = torch.empty(batch, count, self._decoder.shape.hidden_size)
        logits = torch.empty(batch, count, self._decoder.vocab_size)
        ids = ids.contiguous()
        work = self._pass(ids, length, count, hidden, logits)
        unknown = self._decoder.kernel.specctl_pass(self._decoder.address, ctypes.addressof(work))
        self._check(unknown, ids, work.start)
        return Forward(logits, hidden)

    def draw(self, feed: Tensor, count: int, temperature: float, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw tokens after `feed` [1, T], each from the temperature's law and a uniform ([count] float64) of its own.

        Returns ids [count] int64 and what they were drawn from, [count + 1, V], the last row zero. All but the last
        of them are cached. One call for all: what is done for each is what `SamplingLaw` and `SeededChance` do.
        """
        ids, hidden = torch.empty(count, dtype=torch.int64), torch.empty(self._decoder.shape.hidden_size)
        probs = torch.empty(count + 1, self._decoder.vocab_size)
        probs[count].zero_()
        feed, uniforms = feed.contiguous(), uniforms.contiguous()
        work = self._pass(feed, feed.shape[1] + count - 1, 1, hidden, probs)
        draws = _Draws(count, temperature, uniforms.data_ptr(), ids.data_ptr())
        kernel, address = self._decoder.kernel, self._decoder.address
        unknown = kernel.specctl_draw(address, ctypes.addressof(work), ctypes.addressof(draws))
        self._check(unknown, feed, work.start)
        return ids, probs

    def _pass(self, ids: Tensor, reserved: int, num_logits: int, hidden: Tensor, logits: Tensor) -> _Pass:
        """The pass over ids [B, T] contiguous, in a cache that has room for `reserved` more tokens by now."""
        torch.set_num_threads(1)  # what stands around the passes is small, and its threads would be in their way
        start, _ = self._cache.reserve(reserved)
        storage, threads = self._cache.storage, self._decoder.threads
        return _Pass(
            ids.data_ptr(),
            *ids.shape,
            start,
            num_logits,
            num_cores() if threads is None else threads,
            storage.data_ptr(),
            storage.shape[4],
            hidden.data_ptr(),
            logits.data_ptr(),
        )

    def _check(self, unknown: int, ids: Tensor, start: int) -> None:
        """unknown: the first place in ids of a token that the model does not have, or -1."""
        if unknown >= 0:
            self._cache.length = start
            name, size = self._decoder.name, self._decoder.vocab_size
            raise IndexError(f"{name} has no token {ids.flatten()[unknown]}; its vocabulary has {size}")
