"""Which of the two runs a checkpoint: the native decoder, or transformers.

The one place that decides. Knows nothing about drafters, text or run folders.
"""

from pathlib import Path
from typing import Any

import torch

from specctl.config import Backend
from specctl.models.checkpoint import load_checkpoint
from specctl.models.hf import HFModel, HFModule
from specctl.models.hf import load_module as load_hf
from specctl.models.llama import Llama
from specctl.models.llama_decoder import LlamaDecoder
from specctl.models.session import CausalModel
from specctl.run_folder import read_json

Module = Llama | HFModule  # what is loaded, frozen, and can teach


def choose_backend(folder: Path, wanted: Backend) -> tuple[Backend, str | None]:
    """(native or transformers, why not native if it is not). A folder without a config is left to the loader."""
    if wanted == "transformers":
        return "transformers", "runtime.backend asks for it"
    path = folder / "config.json"
    config = read_json(path) if wanted == "auto" and path.is_file() else None
    reason = why_not_native(config) if isinstance(config, dict) else None
    return ("transformers", reason) if reason else ("native", None)


def why_not_native(config: dict[str, Any]) -> str | None:
    """What of a config.json the native decoder does not have; None where it runs it."""
    kind = config.get("model_type")
    return None if kind == "llama" else f"{kind} is no architecture of the native decoder"


def load_module(folder: Path, backend: Backend, dtype: torch.dtype) -> Module:
    """Load a checkpoint for a backend. dtype: of a model behind transformers; a native one is widened to float32."""
    return load_hf(folder, dtype) if backend == "transformers" else load_checkpoint(folder).eval()


def decoder(module: Module, name: str, *, dtype: torch.dtype, device: torch.device) -> CausalModel:
    """A module ready to decode. dtype: of a native one; one behind transformers was loaded in it."""
    if isinstance(module, Llama):
        return LlamaDecoder(module, name, dtype=dtype, device=device)
    return HFModel(module, name, device=device)


def writer(module: Module) -> CausalModel:
    """The target as it writes text for others to learn from: where it lies, as exact as it was loaded."""
    if isinstance(module, Llama):
        return LlamaDecoder(module, "target", dtype=torch.float32, device=torch.device("cpu"))
    return HFModel(module, "target")
