"""Medusa heads on disk: the layout of serving engines is written, and that of the original repository read too.

Serving engines (vLLM and others) read `config.json` and `model.safetensors` with `blocks.{i}.layers.{j}.weight`
and `lm_heads.{i}.weight`. The original repository wrote `medusa_lm_head.safetensors` with
`{i}.{j}.linear.weight` and, for j = the number of layers, `{i}.{j}.weight`. Either may lie in shards. Only
safetensors is read.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from specctl.errors import UsageError
from specctl.models.backend import Module
from specctl.models.checkpoint import weights_fingerprint
from specctl.models.fields import Fields
from specctl.models.headers import ORIGINAL_HEADS, SINGLE, has_weights
from specctl.models.medusa import MedusaHeads, MedusaShape
from specctl.models.weights import Weights, refuse_difference
from specctl.run_folder import read_json, write_atomic, write_json

FINGERPRINT = "target_weights_fingerprint"


def save_heads(heads: MedusaHeads, folder: Path, target: Module) -> None:
    """Write the folder in the layout of serving engines, with the fingerprint of the target's weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().cpu().contiguous() for name, weight in heads.state_dict().items()}
    write_atomic(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        **asdict(heads.shape),
        "truncated_vocab_size": heads.shape.vocab_size,
        "torch_dtype": str(next(heads.parameters()).dtype).removeprefix("torch."),
        FINGERPRINT: weights_fingerprint(target),
    }
    write_json(folder / "config.json", config)


def load_heads(folder: Path, target: Module) -> MedusaHeads:
    """Load heads of either layout, in the target's dtype.

    Raises UsageError naming the file and the cause: missing, truncated or incomplete files, and heads
    of another target (hidden size, vocabulary, or the fingerprint of its weights where one is stored).
    """
    fields = Fields(_read_config(folder), folder / "config.json")
    num_layers = fields.whole(_either(fields, "num_hidden_layers", "medusa_num_layers"), 1, most=_MOST)
    if has_weights(folder, ORIGINAL_HEADS):
        weights = Weights(folder, ORIGINAL_HEADS)
        stored = {_engine_name(name, weights.path, num_layers): name for name in weights}
    elif has_weights(folder):
        weights = Weights(folder)
        stored = {name.removeprefix("medusa_heads."): name for name in weights}
    else:
        raise UsageError(
            f"{folder / SINGLE} is missing (and so is {ORIGINAL_HEADS}); weights in other formats, such as .pt, "
            "are not read"
        )
    found = {name: weights.shapes[theirs] for name, theirs in stored.items()}
    shape = _shape(folder, fields, num_layers, found)
    _refuse_other_target(folder, fields.values, shape, target)
    with torch.device("meta"):
        heads = MedusaHeads(shape)
    refuse_difference(weights.path, {name: tuple(weight.shape) for name, weight in heads.state_dict().items()}, found)
    dtype = target.lm_head.weight.dtype
    heads.load_state_dict({name: weights.read(theirs, dtype) for name, theirs in stored.items()}, assign=True)
    return heads


_MOST = 256  # heads, and layers of one: no model has as many, and a module of more takes long to build


def _either(fields: Fields, name: str, original: str) -> str:
    return name if name in fields.values else original


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{path} is missing; a folder of Medusa heads holds config.json and safetensors weights")
    config = read_json(path)
    kind = config.get("model_type", "medusa") if isinstance(config, dict) else None
    if kind != "medusa" or not {"num_heads", "medusa_num_heads"} & config.keys():
        raise UsageError(f"{path} does not describe Medusa heads (model_type medusa, num_heads)")
    return config


def _engine_name(name: str, path: Path, num_layers: int) -> str:
    """A name of the original repository as serving engines have it."""
    match = re.fullmatch(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)", name)
    if match is None:
        raise UsageError(f"{path} has the foreign tensor {name}; nothing was loaded")
    head, place, linear, kind = match.groups()
    if linear:
        return f"blocks.{head}.layers.{place}.{kind}"
    if int(place) != num_layers:
        raise UsageError(f"{path} has the foreign tensor {name} ({num_layers} layers a head); nothing was loaded")
    return f"lm_heads.{head}.{kind}"


def _shape(folder: Path, fields: Fields, num_layers: int, found: Mapping[str, tuple[int, ...]]) -> MedusaShape:
    """Sizes from the config, those that the original repository left out from the weights."""
    output = found.get("lm_heads.0.weight", ())
    if len(output) != 2:
        raise UsageError(f"{folder} lacks lm_heads.0.weight; nothing was loaded")
    vocab_size = fields.whole("vocab_size", output[0])
    if fields.whole("truncated_vocab_size", vocab_size) != vocab_size:
        raise UsageError(f"{folder} holds heads of a truncated vocabulary, which is not supported")
    return MedusaShape(
        num_heads=fields.whole(_either(fields, "num_heads", "medusa_num_heads"), most=_MOST),
        num_hidden_layers=num_layers,
        hidden_size=fields.whole("hidden_size", output[1]),
        vocab_size=vocab_size,
        original_lm_head=fields.flag("original_lm_head"),
        medusa_fc_bias=fields.flag("medusa_fc_bias", any(name.endswith(".bias") for name in found)),
    )


def _refuse_other_target(folder: Path, config: Mapping[str, Any], shape: MedusaShape, target: Module) -> None:
    for name in ("hidden_size", "vocab_size"):
        mine, theirs = getattr(target.shape, name), getattr(shape, name)
        if mine != theirs:
            raise UsageError(f"the Medusa heads in {folder} are of another target: {name} {theirs}, here {mine}")
    stored, present = config.get(FINGERPRINT), weights_fingerprint(target)
    if stored is not None and stored != present:
        raise UsageError(
            f"the Medusa heads in {folder} were trained on a target with other weights "
            f"(fingerprint {stored}, here {present}); train them again"
        )
