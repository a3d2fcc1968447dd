"""Checkpoints are Hugging Face folders: config.json, model.safetensors, generation_config.json.

Only safetensors is read or written, never a pickle. A folder loads whole or not at all.
Knows nothing about tokenizers or how a model was made; what a config.json means is `families`'s.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from specctl.models.families import config_of, read_shape
from specctl.models.files import open_files
from specctl.models.gguf_weights import GgufWeights
from specctl.models.hf_folder import CONFIG
from specctl.models.llama import Llama, LlamaShape
from specctl.models.weights import Weights, refuse_difference
from specctl.run_folder import fingerprint, write_atomic, write_json

_SAMPLED = 1024  # values of a tensor that its fingerprint looks at
_EXACT_FLOATS = 2**24  # whole numbers that float32 can tell apart


def save_checkpoint(module: Llama, folder: Path, end_of_text: int | None) -> None:
    """Write the folder, the weights first. Tied weights are written once, as transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().cpu().contiguous()
        for name, weight in module.state_dict().items()
        if not (module.shape.tie_word_embeddings and name == "lm_head.weight")
    }
    write_atomic(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))
    special = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    dtype = str(module.lm_head.weight.dtype).removeprefix("torch.")
    write_json(folder / CONFIG, {**config_of(module.shape), "torch_dtype": dtype, **special})
    write_json(folder / "generation_config.json", special)


def load_checkpoint(path: Path, dtype: torch.dtype | None = None) -> Llama:
    """Load a folder or a GGUF file of a family that `families` knows; float32 unless `dtype` is given.

    At its peak it holds the weights once, and one tensor more. float64 weights stay float64 without a `dtype`.
    Raises UsageError naming the file and the cause: missing, truncated, foreign or incomplete.
    """
    shape, weights = open_checkpoint(path)
    dtype = dtype or (torch.float64 if weights.dtypes["model.norm.weight"] == torch.float64 else torch.float32)
    with torch.device("meta"):
        module = Llama(shape)
    names = [name for name in weights if not (shape.tie_word_embeddings and name == "lm_head.weight")]
    largest_first = sorted(names, key=lambda name: -math.prod(weights.shapes[name]))  # the last one makes the peak
    tensors = {name: weights.read(name, dtype) for name in largest_first}
    module.load_state_dict(tensors, strict=not shape.tie_word_embeddings, assign=True)
    module.tie()
    return module


def open_checkpoint(path: Path) -> tuple[LlamaShape, Weights | GgufWeights]:
    """The shape of a folder or GGUF file and its weights, still on disk but all there.

    Reading them builds a model piece by piece. Raises UsageError as `load_checkpoint` does, before any tensor is read.
    """
    shape = read_shape(path)
    weights = open_files(path).weights(shape)
    if shape.tie_word_embeddings:
        weights.share("model.embed_tokens.weight", "lm_head.weight")
    with torch.device("meta"):
        expected = {name: tuple(weight.shape) for name, weight in Llama(shape).state_dict().items()}
    names = {name: weights.stored_name(name) for name in (*expected, *weights)}
    refuse_difference(
        weights.path,
        {names[name]: shape for name, shape in expected.items()},
        {names[name]: shape for name, shape in weights.shapes.items()},
        weights.described_by,
    )
    return shape, weights


def weights_fingerprint(model: nn.Module | Mapping[str, Tensor]) -> str:
    """16 hex digits for the weights of a module or a folder: names, shapes and 1,024 values of each, evenly spread."""
    samples = {}
    for name, weight in (model.state_dict() if isinstance(model, nn.Module) else model).items():
        flat = weight.detach().reshape(-1)
        places = _spread(len(flat), _SAMPLED).to(flat.device)
        values = flat[places].cpu().double().numpy().tobytes()
        samples[name] = [list(weight.shape), hashlib.sha256(values).hexdigest()]
    return fingerprint(samples)


def _spread(length: int, most: int) -> Tensor:
    """At most so many places of a vector, evenly spread, the first and the last among them."""
    if length <= _EXACT_FLOATS:  # as fingerprints of smaller tensors always were
        return torch.linspace(0, length - 1, min(length, most)).long()
    return torch.arange(most) * (length - 1) // (most - 1)


def end_tokens(path: Path) -> frozenset[int]:
    """The end tokens that a folder, or a GGUF file, names."""
    return open_files(path).end_tokens()
