"""Which Hugging Face models the native decoder reads: from a config.json to a `LlamaShape`, and back.

Four families share one architecture and differ in a few switches: llama, mistral, qwen2 (biases of q, k
and v) and qwen3 (norms of q and k). A feature that would change the logits is refused by name, never
ignored. A sliding window shorter than the context caps the context, since inside it nothing differs from
full attention. Defaults are those of `transformers`. Knows nothing about weights.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specctl.errors import UsageError
from specctl.models.fields import Fields
from specctl.models.files import open_files
from specctl.models.hf_folder import CONFIG
from specctl.models.llama import LlamaShape, RopeScaling

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def read_shape(path: Path) -> LlamaShape:
    """The shape that a folder's config.json, or a GGUF file, describes; UsageError, naming file and field, if none."""
    files = open_files(path)
    config, path = files.config(), files.config_path
    reason = why_not_native(config)
    if reason:
        raise UsageError(f"{path} {reason}, which the native decoder does not read (it reads {', '.join(FAMILIES)})")
    return shape_of(config, path)


def is_native(folder: Path) -> bool:
    """Whether the native decoder reads the architecture in a folder; UsageError without a config.json to ask."""
    return why_not_native(open_files(folder).config()) is None


def why_not_native(config: Mapping[str, Any]) -> str | None:
    """What in a config.json the native decoder does not support, as a phrase to follow a name; None if nothing.

    Values that are wrong in any decoder, such as a width of zero, are `shape_of`'s to refuse.
    """
    if config.get("model_type") not in FAMILIES:
        return f"describes a {config.get('model_type')!r} model"
    rope = _rope(config)
    rope_type = _rope_type(rope)
    nested = any(isinstance(value, dict) for value in rope.values())
    layer_types = config.get("layer_types")
    other_layers = [kind for kind in layer_types if kind not in _LAYERS] if isinstance(layer_types, list) else []
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    activation = config.get("hidden_act") or "silu"
    unsupported = {
        "rope parameters that differ by layer": nested,
        f"rope type {rope_type}": not nested and rope_type not in ("default", "linear", "llama3"),
        f"partial_rotary_factor {rotated}": rotated not in (None, 1),
        f"hidden_act {activation}": activation not in ("silu", "swish"),
        f"layers of type {', '.join(map(str, other_layers[:1]))}": other_layers,
        "quantised weights (quantization_config)": config.get("quantization_config"),
    }
    found = [name for name, present in unsupported.items() if present]
    return f"uses {', '.join(found)}" if found else None


_LAYERS = ("full_attention", "sliding_attention")


def shape_of(config: Mapping[str, Any], path: Path = Path(CONFIG)) -> LlamaShape:
    """The shape of a model whose `why_not_native` is None; UsageError naming the field that makes no sense."""
    family, fields = config["model_type"], Fields(config, path)
    heads = fields.whole("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads", _KV_HEADS.get(family)) or heads
    if heads % kv_heads:
        raise fields.refuse(f"has num_key_value_heads {kv_heads}, which does not divide num_attention_heads {heads}")
    context = fields.whole("max_position_embeddings", _CONTEXT[family])
    window = _sliding_window(fields, family)
    rope = _rope_fields(fields)
    all_biased = family in ("llama", "qwen3") and fields.flag("attention_bias")
    return LlamaShape(
        vocab_size=fields.whole("vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        intermediate_size=fields.whole("intermediate_size"),
        num_hidden_layers=fields.whole("num_hidden_layers", most=10_000),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(fields, family, heads),
        max_position_embeddings=min(context, window or context),
        rope_theta=rope.number("rope_theta", *_THETA, default=fields.number("rope_theta", *_THETA, default=10000.0)),
        rope_scaling=_rope_scaling(fields, rope, context),
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=all_biased or family == "qwen2",
        o_bias=all_biased,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
    )


_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_CONTEXT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_THETA = (1e-6, 1e30)


def config_of(shape: LlamaShape) -> dict[str, Any]:
    """The config.json of a shape, for `transformers` and serving engines; the plainest family that has its switches."""
    switches = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "rope_scaling")
    sizes = {name: value for name, value in asdict(shape).items() if name not in switches}
    if shape.qk_norm:
        family, name, own = "qwen3", "Qwen3", {"attention_bias": shape.o_bias}
    elif shape.qkv_bias and not shape.o_bias:
        family, name, own = "qwen2", "Qwen2", {}
    else:
        family, name, own = "llama", "Llama", {"attention_bias": shape.o_bias, "mlp_bias": shape.mlp_bias}
    scaling = {"rope_scaling": _scaling_config(shape.rope_scaling)} if shape.rope_scaling else {}
    config = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": family,
        **sizes,
        **own,
        **scaling,
        "hidden_act": "silu",
    }
    assert shape_of(config) == shape, "no family has these switches together"
    return config


def _scaling_config(scaling: RopeScaling) -> dict[str, Any]:
    used = ("rope_type", "factor") if scaling.rope_type == "linear" else tuple(asdict(scaling))
    return {name: getattr(scaling, name) for name in used}


def _head_dim(fields: Fields, family: str, heads: int) -> int:
    head_dim = fields.optional("head_dim", 128 if family == "qwen3" else None)
    if head_dim is None:
        width = fields.whole("hidden_size")
        if width % heads:
            raise fields.refuse(f"has num_attention_heads {heads}, which does not divide hidden_size {width}")
        head_dim = width // heads
    if head_dim % 2:
        raise fields.refuse(f"gives a head_dim of {head_dim}; rotary positions need an even one")
    return head_dim


def _sliding_window(fields: Fields, family: str) -> int | None:
    """The tokens that the most short-sighted layer sees, None where all see everything."""
    if family == "llama":
        return None
    if family == "mistral":
        return fields.optional("sliding_window", 4096)
    if not fields.flag("use_sliding_window"):
        return None
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list):
        slides = "sliding_attention" in kinds
    else:
        slides = fields.whole("max_window_layers", 28, least=0) < fields.whole("num_hidden_layers")
    return fields.optional("sliding_window", 4096) if slides else None


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters, under their new name or their old one."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    return rope if isinstance(rope, dict) else {}


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


def _rope_fields(fields: Fields) -> Fields:
    parts = [fields.part(name) for name in ("rope_scaling", "rope_parameters")]
    return parts[0] if parts[0].values else parts[1]


def _rope_scaling(fields: Fields, rope: Fields, context: int) -> RopeScaling | None:
    rope_type = _rope_type(rope.values)
    if rope_type == "default":
        return None
    factor = rope.number("factor", 1.0, 1e6)
    if rope_type == "linear":
        return RopeScaling(rope_type="linear", factor=factor)
    low, high = (rope.number(f"{which}_freq_factor", 1e-6, 1e6) for which in ("low", "high"))
    if high <= low:
        raise rope.refuse(f"has {rope.prefix}high_freq_factor {high:g}, which is not above low_freq_factor {low:g}")
    name = "original_max_position_embeddings"
    trained = fields.whole(name, None) or rope.whole(name, context)
    return RopeScaling(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=trained,
    )
