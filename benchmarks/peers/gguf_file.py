"""A checkpoint folder of a Llama as a GGUF file, the format that llama.cpp and openvino-genai read.

Source of names and layout: the `gguf` package's own tables and llama.cpp's conversion; rows of the query and key
matrices are put in the order of its rotary embedding, which turns neighbours rather than halves.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from specctl.errors import SpecctlError

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_BLOCK = 32  # numbers that share a scale in q8_0


def write_gguf(folder: Path, path: Path, form: str) -> None:
    """form: f32, f16, bf16 or q8_0; norms stay float32. Raises SpecctlError for another kind of model."""
    import gguf

    config, tokenizer = _read(folder / "config.json"), _read(folder / "tokenizer.json")
    if config.get("model_type") != "llama" or tokenizer["model"]["type"] != "BPE":
        raise SpecctlError(f"{folder}: only Llama models with a BPE tokenizer are written as GGUF")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise SpecctlError(f"{folder}: scaled rotary embeddings are not written as GGUF")
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer, config, rope)
    writer.add_file_type(getattr(gguf.LlamaFileType, "ALL_F32" if form == "f32" else f"MOSTLY_{form.upper()}"))
    _add_tokenizer(writer, config, tokenizer)
    kind = getattr(gguf.GGMLQuantizationType, form.upper())
    for name, weight in tensors(folder, config):
        if weight.ndim == 1 or form == "f32" or (form == "q8_0" and weight.shape[-1] % _BLOCK):
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Every weight under its name in GGUF, float32. Raises SpecctlError for one that has none."""
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads") or heads
    for file in sorted(folder.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            stem = name.removesuffix(".weight")
            if stem == "lm_head" and config.get("tie_word_embeddings"):
                continue
            if stem in _OUTER:
                to = _OUTER[stem]
            else:
                layer, _, part = stem.removeprefix("model.layers.").partition(".")
                if not layer.isdecimal() or part not in _NAMES:
                    raise SpecctlError(f"{file}: no name in GGUF for {name}")
                to = f"blk.{layer}.{_NAMES[part]}"
                if part.endswith(("q_proj", "k_proj")):
                    weight = _neighbours(weight, heads if part.endswith("q_proj") else key_heads)
            yield f"{to}.weight", weight.float().contiguous().numpy()


def _neighbours(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head's two halves, taken in turn."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _add_shape(writer: Any, config: dict[str, Any], rope: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_freq_base(float(config.get("rope_theta") or rope.get("rope_theta") or 10_000))


def _add_tokenizer(writer: Any, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    """The vocabulary and its merges. How text is split before them does not matter: prompts are given as ids."""
    import gguf

    size, added = config["vocab_size"], {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    names = {token_id: name for name, token_id in tokenizer["model"]["vocab"].items()}
    names |= {token_id: token["content"] for token_id, token in added.items()}

    def type_of(token_id: int) -> Any:
        if token_id in added:
            return gguf.TokenType.CONTROL if added[token_id]["special"] else gguf.TokenType.USER_DEFINED
        return gguf.TokenType.NORMAL if token_id in names else gguf.TokenType.UNUSED

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(token_id, f"[PAD{token_id}]") for token_id in range(size)])
    writer.add_token_types([type_of(token_id) for token_id in range(size)])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name in ("bos", "eos"):
        token_id = config.get(f"{name}_token_id")
        token_id = token_id[0] if isinstance(token_id, list) else token_id
        if token_id is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
