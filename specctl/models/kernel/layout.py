"""What the kernel reads: the structures of `pass.cpp`, field by field, and weights laid out for it.

Shapes: V vocab, D width. Knows nothing about sessions.
"""

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_double, c_float, c_int64, c_void_p

import torch
from torch import Tensor

BLOCK = 16  # columns of a block of weights
_ALIGNED = 64  # bytes


class Matrix(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("is_half", c_int64),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("feed_forward_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    )


class Model(ctypes.Structure):
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
        ("lm_head", Matrix),
    )


class Pass(ctypes.Structure):
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


class Draws(ctypes.Structure):
    _fields_ = (
        ("count", c_int64),
        ("temperature", c_double),
        ("uniforms", c_void_p),
        ("ids", c_void_p),
        ("mass", c_void_p),
    )


class Memory:
    """Room for weights in one piece, on large pages where the system has them: that many fewer addresses to look up.

    settle: called before it is given back; waits for threads that may still look at it. layers: what lies there,
    layer by layer, kept as long as the weights are.
    """

    def __init__(self, num_bytes: int, settle: Callable[[], None] = lambda: None) -> None:
        self._settle, self._used = settle, 0
        self.layers: ctypes.Array[Layer] | None = None
        # Private memory: shared memory, the default, comes on large pages only where a system's administrator says so.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._map = mmap.mmap(-1, num_bytes, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system may have none
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def __del__(self) -> None:
        self._settle()

    def hold(self, tensor: Tensor) -> int:
        """The address of a copy, valid as long as this memory."""
        room = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        room.view(tensor.shape).copy_(tensor)
        self._used += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        return room.data_ptr()


def held_bytes(weight: Tensor) -> int:
    """The most that a parameter takes: float32, in whole blocks."""
    rows = -(-len(weight) // BLOCK) * BLOCK
    return -(-rows * weight[0].numel() * 4 // _ALIGNED) * _ALIGNED


def blocks(rows: Tensor) -> Tensor:
    """[out, ...] as [ceil(out / 16), 16, ...], padded with zeros."""
    padding = -len(rows) % BLOCK
    if padding:
        rows = torch.cat((rows, rows.new_zeros(padding, *rows.shape[1:])))
    return rows.unflatten(0, (-1, BLOCK))


def narrowed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """In bfloat16 where that is asked for or loses nothing, else in float32."""
    narrow = weight.to(torch.bfloat16)
    return narrow if dtype == torch.bfloat16 or torch.equal(narrow.to(weight.dtype), weight) else weight.float()
