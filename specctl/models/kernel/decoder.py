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
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from specctl.hardware import num_cores
from specctl.models.kernel import layout, library
from specctl.models.kv_cache import cache_for
from specctl.models.llama import Layer, Llama, LlamaShape, rotary_table
from specctl.models.session import Capabilities, Drawn, Forward

_KEYS = 32  # positions of a block of keys
_DTYPES = (torch.float32, torch.bfloat16)


def why_not_kernel(
    shape: LlamaShape,
    dtype: torch.dtype,
    device: torch.device,
    narrate: Callable[[str], None] = lambda line: None,
    *,
    build: bool = True,
) -> str | None:
    """Why the kernel cannot run such a model here, or None where it can; it is built first if it is not, and told.

    build: False takes for granted that a compiler which is there can build it.
    """
    if device.type != "cpu":
        return "the kernel runs on a CPU"
    if dtype not in _DTYPES:
        return f"the kernel takes runtime.dtype float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if shape.hidden_size % 8 or shape.intermediate_size % 8 or shape.head_dim % layout.BLOCK:
        return "the kernel takes widths that are multiples of 8 and a head dim that is one of 16"
    try:
        is_built = library.is_built()
        if build and not is_built:
            narrate("building the kernel for this processor, once; it takes seconds")
        if build or is_built:
            library.load(narrate)
    except library.KernelUnavailable as error:
        return str(error)
    return None


class KernelDecoder:
    """A `CausalModel`. threads: of its passes; None takes all cores. dtype: bfloat16 rounds the weights to it."""

    engine = "kernel"
    capabilities = Capabilities(draws=True, same_bits=True)

    def __init__(self, module: Llama, name: str, *, dtype: torch.dtype, use_up: bool = False) -> None:
        """use_up: let go of each of the module's weights once it is laid out, so that they are held once.

        Raises KernelUnavailable where there is no kernel; ask `why_not_kernel` first.
        """
        self.name, self.shape, self.dtype, self.device = name, module.shape, dtype, torch.device("cpu")
        self.vocab_size = module.shape.vocab_size
        self.threads: int | None = None
        self.num_cores = num_cores()
        self.pass_bytes = 0  # of weights that a pass reads: all but an embedding of its own
        self.kernel = library.load()
        bytes_held = sum(layout.held_bytes(weight) for weight in module.parameters())
        self._memory = layout.Memory(bytes_held, settle=self.kernel.specctl_settle)
        shape, backbone = module.shape, module.model
        lm_head = self._matrix([module.lm_head])
        tied = module.lm_head.weight is backbone.embed_tokens.weight
        embedding = None if tied else layout.narrowed(backbone.embed_tokens.weight.detach(), dtype)
        if use_up:
            _empty(module.lm_head)
        layers = (layout.Layer * shape.num_hidden_layers)()
        for index, layer in enumerate(backbone.layers):
            assert isinstance(layer, Layer)
            layers[index] = self._layer(layer)
            if use_up:
                _empty(layer)
        self._memory.layers = layers
        self._model = layout.Model(
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
        self._model = layout.Model.from_buffer_copy(self._model)
        self._model.rotary = self._rotary.data_ptr()

    def trimmed(self, vocab_size: int) -> "KernelDecoder":
        """The same weights over the first `vocab_size` tokens, no more than there are."""
        other = copy.copy(self)
        other.vocab_size = vocab_size
        other._model = layout.Model.from_buffer_copy(self._model)
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

    def _layer(self, layer: Layer) -> layout.Layer:
        attention, feed_forward = layer.self_attn, layer.mlp
        q_norm, k_norm = attention.q_norm, attention.k_norm
        return layout.Layer(
            attention_norm=self._floats(layer.input_layernorm.weight),
            feed_forward_norm=self._floats(layer.post_attention_layernorm.weight),
            q_norm=self._floats(q_norm.weight) if isinstance(q_norm, nn.RMSNorm) else None,
            k_norm=self._floats(k_norm.weight) if isinstance(k_norm, nn.RMSNorm) else None,
            qkv=self._matrix([attention.q_proj, attention.k_proj, attention.v_proj]),
            out=self._matrix([attention.o_proj]),
            gate_up=self._matrix([feed_forward.gate_proj, feed_forward.up_proj], alternate=True),
            down=self._matrix([feed_forward.down_proj]),
        )

    def _matrix(self, linears: Sequence[nn.Linear], alternate: bool = False) -> layout.Matrix:
        """Linears side by side, or block by block in turn. Each of them is padded to whole blocks."""
        blocks = [layout.blocks(linear.weight.detach()) for linear in linears]
        weight = torch.stack(blocks, 1).flatten(0, 1) if alternate else torch.cat(blocks)  # [blocks, 16, in]
        bias = None
        if linears[0].bias is not None:
            biases = [layout.blocks(linear.bias.detach()) for linear in linears]
            bias = (torch.stack(biases, 1) if alternate else torch.cat(biases)).flatten()
        weight = layout.narrowed(weight, self.dtype)
        is_half, (count, _, width) = weight.dtype == torch.bfloat16, weight.shape
        if is_half:  # columns j and j + 8 side by side
            weight = weight.view(count, 2, 8, width).transpose(1, 2).flatten(1, 2)
        weight = weight.transpose(1, 2)  # [blocks, in, 16]
        self.pass_bytes += weight.nbytes
        columns = count * layout.BLOCK if len(linears) > 1 else linears[0].out_features
        return layout.Matrix(
            weight=self._memory.hold(weight),
            bias=None if bias is None else self._floats(bias),
            rows=width,
            columns=columns,
            is_half=is_half,
        )

    def _floats(self, values: Tensor) -> int:
        return self._memory.hold(values.detach().float())


def _empty(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.data = weight.data.new_empty(0)


class KernelSession:
    """A `KernelDecoder` and its cache for B equally long sequences; a `Session`."""

    def __init__(self, decoder: KernelDecoder, batch_size: int) -> None:
        self._decoder = decoder
        self._cache = cache_for(decoder.shape, batch_size, torch.float32, decoder.device, block=_KEYS)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._cache.length,) * self._cache.batch_size

    def keep(self, lengths: tuple[int, ...]) -> None:
        self._cache.keep(lengths)

    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        batch, length = ids.shape
        count = length if num_logits is None else num_logits
        ids = self._checked(ids, count)
        hidden = torch.empty(batch, count, self._decoder.shape.hidden_size)
        logits = torch.empty(batch, count, self._decoder.vocab_size)
        work = self._pass(ids, length, count, hidden, logits)
        unknown = self._decoder.kernel.specctl_pass(self._decoder.address, ctypes.addressof(work))
        self._check(unknown, ids, work.start)
        return Forward(logits, hidden)

    def draw(self, feed: Tensor, count: int, temperature: float, uniforms: Tensor) -> Drawn:
        """Draw tokens after `feed` [1, T], each at the temperature alone, from a uniform ([count] float64) of its own.

        All but the last of them are cached then. One call for all: what is done for each is what `SamplingLaw` and
        `SeededChance` do.
        """
        if count < 1 or len(feed) != 1 or len(uniforms) != count:
            raise ValueError(f"{count} tokens of {len(feed)} sequences from {len(uniforms)} uniforms cannot be drawn")
        feed, uniforms = self._checked(feed, 1), uniforms.to(torch.float64).contiguous()
        ids, mass = torch.empty(count, dtype=torch.int64), torch.empty(count)
        hidden = torch.empty(1, 1, self._decoder.shape.hidden_size)
        probs = torch.empty(count + 1 if temperature else 1, self._decoder.vocab_size)
        if temperature:
            probs[count].zero_()
        work = self._pass(feed, feed.shape[1] + count - 1, 1, hidden, probs)
        draws = layout.Draws(count, temperature, uniforms.data_ptr(), ids.data_ptr(), mass.data_ptr())
        kernel, address = self._decoder.kernel, self._decoder.address
        unknown = kernel.specctl_draw(address, ctypes.addressof(work), ctypes.addressof(draws))
        self._check(unknown, feed, work.start)
        return Drawn(ids=ids, mass=mass, probs=probs if temperature else None, hidden=hidden)

    def _checked(self, ids: Tensor, num_logits: int) -> Tensor:
        """ids as the kernel reads them, checking nothing. Raises ValueError for what is not a pass of this session."""
        batch, length = ids.shape
        if ids.device.type != "cpu" or ids.is_floating_point():
            raise ValueError(f"token ids are integers on the CPU, not {ids.dtype} on {ids.device}")
        if batch != self._cache.batch_size or not 1 <= num_logits <= length:
            raise ValueError(
                f"{num_logits} rows of logits from {length} tokens of {batch} sequences, in a session of "
                f"{self._cache.batch_size}"
            )
        return ids.to(torch.int64).contiguous()

    def _pass(self, ids: Tensor, reserved: int, num_logits: int, hidden: Tensor, logits: Tensor) -> layout.Pass:
        """The pass over ids [B, T] contiguous, in a cache that has room for `reserved` more tokens by now."""
        start, _ = self._cache.reserve(reserved)
        storage, threads = self._cache.storage, self._decoder.threads
        return layout.Pass(
            ids.data_ptr(),
            *ids.shape,
            start,
            num_logits,
            self._decoder.num_cores if threads is None else max(1, threads),
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
