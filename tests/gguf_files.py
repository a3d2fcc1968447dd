"""Small GGUF files, written with the `gguf` package's own writer: models of transformers, and vocabularies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], types: Mapping[str, Any] | None = None
) -> Path:
    """types: the quantisation of tensors that are given as bytes."""
    import gguf

    writer = gguf.GGUFWriter(path, str(metadata["general.architecture"]))
    for name, value in metadata.items():
        if name == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata_of(model: Any, architecture: str, **changes: Any) -> dict[str, Any]:
    """What llama.cpp would write of a model of transformers; a change to None takes a field out."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    found = {f"{architecture}.{name}": value for name, value in fields.items()}
    found = {"general.architecture": architecture, "general.name": "small", **found, **changes}
    return {name: value for name, value in found.items() if value is not None}


def tensors_of(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The weights as llama.cpp lays them out: rows of Llama's q and k one by one to where it wants them."""
    config, found = model.config, {}
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        layer, part = ("", stem)
        if stem.startswith("model.layers."):
            _, _, number, part = stem.split(".", 3)
            layer = f"blk.{number}."
        if architecture == "llama" and part in heads:
            weight = paired(weight, heads[part])
        found[f"{layer}{NAMES[part]}.{kind}"] = weight.detach().float().numpy().copy()
    return found


def paired(rows: Tensor, heads: int) -> Tensor:
    """Row 2 i of a head is what was its row i, and row 2 i + 1 what was row i + Hd / 2."""
    width = rows.shape[0] // heads
    order = []
    for head in range(heads):
        for pair in range(width // 2):
            order += [head * width + pair, head * width + width // 2 + pair]
    return rows[torch.tensor(order)]


def byte_level_vocabulary(text: str, size: int, pre: str, **changes: Any) -> dict[str, Any]:
    """Metadata of a BPE that is learned here, with two control tokens before it and a user-defined one behind."""
    import json

    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([text], trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<think>"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3), USER_DEFINED],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **changes,
    }
    return {name: value for name, value in found.items() if value is not None}


def sentencepiece_vocabulary(texts: Sequence[str], size: int, **changes: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece BPE: special tokens, bytes, and pieces with the scores of their merges' order."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    vocabulary = json.loads(backend.to_str())["model"]["vocab"]
    pieces = sorted(vocabulary, key=vocabulary.get)
    pieces = [piece for piece in pieces if len(piece) > 1] + [piece for piece in pieces if len(piece) == 1]
    first = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    found = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*first, *pieces, "<tool>"],
        "tokenizer.ggml.scores": [0.0] * len(first) + [-float(rank) for rank in range(len(pieces))] + [0.0],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }
    return {name: value for name, value in found.items() if value is not None}
