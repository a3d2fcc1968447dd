"""A decoder whose passes are one call of the kernel: the weights laid out for it, and its sessions.

On a CPU. Computes in float32. Weights are held as bfloat16 where that is asked for, and also where nothing
is lost by it: a matrix whose every weight is a bfloat16 number, as in most published checkpoints, gives the
same bits in half the bytes.

A token's logits do not depend on what else is in its pass, down to the last bit (`pass.cpp` says why).

Shapes: B sequences, T tokens, V vocab, D width, F feed-forward width, H heads, Hkv key-value heads, Hd head dim.
Knows nothing about sampling, text or files.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor, nn

from specctl.hardware import num_cores
from specctl.models.kernel import library
from specctl.models.kv_cache import KVCache
from specctl.models.llama import Layer, Llama, LlamaShape, rotary_table
from specctl.models.session import Forward

_BLOCK = 16  # columns of a block of weights
_KEYS = 32  # positions of a block of keys
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
        self.threads: int | None = None
        self.pass_bytes = 0  # of weights that a pass reads: all but an embedding of its own
        self._run = library.load().specctl_pass
        self._held: list[Tensor] = []
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
            embedding=None if embedding is None else self._hold(embedding),
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

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def context_length(self) -> int:
        return self.shape.max_position_embeddings

    def session(self, batch_size: int = 1) -> "KernelSession":
        return KernelSession(self, batch_size)

    def run(self, ids: Tensor, cache: KVCache, start: int, num_logits: int) -> Forward:
        """The pass over ids [B, T] int64 at positions from `start` on. Raises IndexError for an unknown id."""
        batch, length = ids.shape
        ids = ids.contiguous()
        hidden = torch.empty(batch, num_logits, self.shape.hidden_size)
        logits = torch.empty(batch, num_logits, self.shape.vocab_size)
        storage = cache.storage
        work = _Pass(
            ids.data_ptr(),
            batch,
            length,
            start,
            num_logits,
            num_cores() if self.threads is None else self.threads,
            storage.data_ptr(),
            storage.shape[4],
            hidden.data_ptr(),
            logits.data_ptr(),
        )
        unknown: int = self._run(ctypes.addressof(self._model), ctypes.addressof(work))
        if unknown >= 0:
            raise IndexError(f"{self.name} has no token {ids.flatten()[unknown]}; its vocabulary is {self.vocab_size}")
        return Forward(logits, hidden)

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
        weight = weight.transpose(1, 2).contiguous()  # [blocks, in, 16]
        self.pass_bytes += weight.nbytes
        columns = count * _BLOCK if len(linears) > 1 else linears[0].out_features
        return _Matrix(
            weight=self._hold(weight),
            bias=None if bias is None else self._floats(bias),
            rows=width,
            columns=columns,
            is_half=is_half,
        )

    def _floats(self, values: Tensor) -> int:
        return self._hold(values.detach().float().contiguous())

    def _hold(self, tensor: Tensor) -> int:
        """Its address, valid as long as this decoder."""
        self._held.append(tensor)
        return tensor.data_ptr()


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
        torch.set_num_threads(1)  # what stands around the passes is small, and its threads would be in their way
        length = ids.shape[1]
        start, _ = self._cache.reserve(length)
        try:
            return self._decoder.run(ids, self._cache, start, length if num_logits is None else num_logits)
        except IndexError:
            self._cache.length = start
            raise
