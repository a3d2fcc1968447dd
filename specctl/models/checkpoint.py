"""Checkpoints are Hugging Face folders: config.json, model.safetensors, generation_config.json.

Only safetensors is read or written, never a pickle. A folder loads whole or not at all.
Knows nothing about tokenizers or how a model was made.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from specctl.errors import UsageError
from specctl.models.llama import Llama, LlamaShape
from specctl.run_folder import fingerprint, read_json, write_atomic, write_json


def save_checkpoint(module: Llama, folder: Path, end_of_text: int | None) -> None:
    """Write the folder, the weights first. Tied weights are written once, as transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().cpu().contiguous()
        for name, weight in module.state_dict().items()
        if not (module.shape.tie_word_embeddings and name == "lm_head.weight")
    }
    write_atomic(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))
    dtype = str(module.lm_head.weight.dtype).removeprefix("torch.")
    special = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(module.shape),
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        **special,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special)


def load_checkpoint(folder: Path) -> Llama:
    """Load a folder written here or any plain Llama-architecture folder, widened to float32.

    Raises UsageError naming the file and the cause: missing, truncated, foreign or incomplete.
    """
    module = Llama(_read_shape(folder)).requires_grad_(True)
    weights_path = folder / "model.safetensors"
    if not weights_path.is_file():
        raise UsageError(f"{weights_path} is missing; a checkpoint folder holds config.json and model.safetensors")
    weights = read_weights(weights_path)
    if module.shape.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
        weights["lm_head.weight"] = weights.get("model.embed_tokens.weight", torch.empty(0))
    expected = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    found = {name: tuple(weight.shape) for name, weight in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    refuse_difference(weights_path, expected, found)
    dtype = torch.float64 if weights["model.norm.weight"].dtype == torch.float64 else torch.float32
    module.to(dtype).load_state_dict({name: weights[name] for name in expected})
    return module


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; UsageError naming it where it cannot be read."""
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} cannot be read ({error}); it is truncated or not safetensors") from None
    for name, weight in weights.items():
        if weight.dtype not in _DTYPES:
            raise UsageError(
                f"{path}: {name} is {str(weight.dtype).removeprefix('torch.')}; quantised weights are not read"
            )
    return weights


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def weights_fingerprint(module: nn.Module) -> str:
    """16 hex digits for the weights of a module: names, shapes and 1,024 values of each, evenly spread."""
    samples = {}
    for name, weight in module.state_dict().items():
        flat = weight.detach().reshape(-1)
        places = torch.linspace(0, len(flat) - 1, min(len(flat), 1024), device=flat.device).long()
        values = flat[places].cpu().double().numpy().tobytes()
        samples[name] = [list(weight.shape), hashlib.sha256(values).hexdigest()]
    return fingerprint(samples)


def end_tokens(folder: Path) -> frozenset[int]:
    """The end tokens that generation_config.json, or else config.json, names."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            config = read_json(folder / name)
            value = config.get("eos_token_id") if isinstance(config, dict) else None
            if value is not None:
                ids = value if isinstance(value, list) else [value]
                if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
                    raise UsageError(f"{folder / name}: eos_token_id is {value!r}; it must be one or more token ids")
                return frozenset(ids)
    return frozenset()


def _read_shape(folder: Path) -> LlamaShape:
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{path} is missing; a checkpoint folder holds config.json and model.safetensors")
    config = read_json(path)
    if not isinstance(config, dict) or config.get("model_type") != "llama":
        kind = config.get("model_type") if isinstance(config, dict) else json.dumps(config)[:40]
        raise UsageError(f"{path} describes a {kind!r} model; only the llama architecture is read")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _refuse_unsupported(path, config, rope)
    heads = config["num_attention_heads"]
    return LlamaShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        rope_theta=config.get("rope_theta") or rope.get("rope_theta", 10000.0),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
    )


def _refuse_unsupported(path: Path, config: dict[str, Any], rope: dict[str, Any]) -> None:
    """A feature that would change the logits is refused by name, never ignored."""
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in needed if name not in config]
    if missing:
        raise UsageError(f"{path} lacks {', '.join(missing)}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    unsupported = {
        f"rope type {rope_type}": rope_type != "default",
        "attention_bias": config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
        f"hidden_act {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
    }
    found = [name for name, present in unsupported.items() if present]
    if found:
        raise UsageError(f"{path} uses {', '.join(found)}, which this decoder does not support")


def refuse_difference(path: Path, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise UsageError for tensors (shapes by name) that are missing, foreign or of another shape."""
    problems = [f"lacks {name}" for name in expected if name not in found]
    problems += [f"has the foreign tensor {name}" for name in found if name not in expected]
    problems += [
        f"has {name} of shape {list(found[name])}, config.json says {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise UsageError(f"{path} {problems[0]}{more}; nothing was loaded")
