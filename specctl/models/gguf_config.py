"""What a GGUF file's metadata says of a model, in the terms of a config.json; needs no torch.

The four families of `families.py`; a feature that would change the logits is refused by name, never ignored. Names
of tensors too: `blk.0.attn_q.weight` is `model.layers.0.self_attn.q_proj.weight`. Llama's q and k lie with rotated
pairs adjacent there, which `gguf_weights.py` undoes. Knows nothing about quantisation.
"""

import math
import re
import struct
from pathlib import Path
from typing import Any

from specctl.errors import UsageError
from specctl.models.fields import Fields
from specctl.models.gguf_file import GgufHeader, GgufTensor

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_DIVISORS = "rope_freqs.weight"
_LLAMA3: dict[str, Any] = {  # of every release that has these divisors, which tell the factor alone
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OF_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")
_HF_PARTS = {theirs: ours for ours, theirs in _PARTS.items()}
_HF_WHOLE = {theirs: ours for ours, theirs in _WHOLE.items()}

# Fields that change the logits, and the values with which they do not.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (1.0,),
}


def config_of(header: GgufHeader, path: Path) -> dict[str, Any]:
    """What would stand in a config.json. Raises UsageError, naming the field, for what is not read or makes no sense.

    Whether q, k, v and the others have biases, and whether embedding and output are tied, the tensors tell.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        what = f"a {architecture!r} model" if isinstance(architecture, str) else "a model without general.architecture"
        raise UsageError(f"{path} holds {what}, which is not read (read are {', '.join(ARCHITECTURES)})")
    prefix = f"{architecture}."
    values = {name.removeprefix(prefix): value for name, value in header.metadata.items() if name.startswith(prefix)}
    fields = Fields(values, path, prefix)
    for name, harmless in _HARMLESS.items():
        if name in values and values[name] not in harmless:
            raise fields.refuse(f"uses {prefix}{name} {values[name]}, which the decoder does not have")
    heads = fields.whole("attention.head_count")
    width, context = fields.whole("embedding_length"), fields.whole("context_length")
    if width % heads and "attention.key_length" not in values:
        raise fields.refuse(f"has {prefix}attention.head_count {heads}, which does not divide embedding_length {width}")
    head_dim = fields.whole("attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (found := fields.whole(name, head_dim)) != head_dim:
            raise fields.refuse(
                f"has {prefix}{name} {found}, where heads are {head_dim} wide; the decoder has one width"
            )
    theta = fields.number("rope.freq_base", 1e-6, 1e30, default=10000.0)
    return {
        "model_type": _family(header, architecture),
        "architectures": [architecture],
        "vocab_size": _num_rows(header, fields),
        "hidden_size": width,
        "intermediate_size": fields.whole("feed_forward_length"),
        "num_hidden_layers": fields.whole("block_count", most=10_000),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": min(context, fields.whole("attention.sliding_window", None, least=0) or context),
        "rope_theta": theta,
        "rope_scaling": _scaling(header, path, fields, theta, head_dim),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
    }


def weights_of(header: GgufHeader) -> dict[str, GgufTensor]:
    """The tensors that are weights of a model."""
    return {name: tensor for name, tensor in header.tensors.items() if name != _ROPE_DIVISORS}


def hf_name(name: str) -> str | None:
    """What Hugging Face calls a tensor; None for one that no model here has."""
    if layer := _OF_LAYER.fullmatch(name):
        number, part, kind = layer.groups()
        return f"model.layers.{number}.{_PARTS[part]}.{kind}" if part in _PARTS else None
    return _WHOLE.get(name)


def gguf_name(name: str) -> str:
    """What a file calls a tensor of Hugging Face's name."""
    if layer := _OF_HF_LAYER.fullmatch(name):
        number, part, kind = layer.groups()
        return f"blk.{number}.{_HF_PARTS[part]}.{kind}"
    return _HF_WHOLE[name]


def _family(header: GgufHeader, architecture: str) -> str:
    """The family that has this file's switches: Mistral's are Llama's, and with biases of q, k and v alone Qwen2's."""
    biased = [f"blk.0.attn_{part}.bias" in header.tensors for part in ("q", "output")]
    if architecture in ("llama", "mistral"):
        return "qwen2" if biased == [True, False] else "llama"
    return architecture


def _num_rows(header: GgufHeader, fields: Fields) -> int:
    """Rows of the embedding, as the metadata says if it does: the vocabulary, which may be padded."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    embedding = header.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding else len(tokens) if isinstance(tokens, list) else None
    return int(fields.whole("vocab_size", rows) or fields.whole("vocab_size"))


def _scaling(header: GgufHeader, path: Path, fields: Fields, theta: float, head_dim: int) -> dict[str, Any] | None:
    """How rotary frequencies are slowed down: linearly, as the metadata says, or as llama3's, which a tensor says."""
    kind = fields.values.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise fields.refuse(f"uses rope scaling of type {kind}, which the decoder does not have")
    factor = fields.number("rope.scale_linear", 1.0, 1e6, default=1.0)
    if kind == "linear":
        factor = fields.number("rope.scaling.factor", 1.0, 1e6, default=factor)
    divisors = _rope_divisors(header, path)
    slowest = max(divisors, default=1.0)
    if slowest == 1:
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    wanted = [_llama3_divisor(theta ** (-2 * pair / head_dim), slowest) for pair in range(head_dim // 2)]
    near = (math.isclose(one, other, rel_tol=1e-3) for one, other in zip(divisors, wanted, strict=False))
    if factor != 1 or len(divisors) != len(wanted) or not all(near):
        raise fields.refuse(f"has {_ROPE_DIVISORS} that are not those of llama3, which the decoder does not have")
    return {**_LLAMA3, "factor": slowest}


def _llama3_divisor(frequency: float, factor: float) -> float:
    """What llama3's scaling divides a frequency by, radians a position."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1 / (kept + (1 - kept) / factor)


def _rope_divisors(header: GgufHeader, path: Path) -> tuple[float, ...]:
    tensor = header.tensors.get(_ROPE_DIVISORS)
    if tensor is None:
        return ()
    if tensor.storage.name != "F32" or len(tensor.shape) != 1:
        raise UsageError(
            f"{path} has {_ROPE_DIVISORS} as {tensor.storage.name} {list(tensor.shape)}; it must be a row of F32"
        )
    with open(path, "rb") as file:
        file.seek(tensor.offset)
        return struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes))
