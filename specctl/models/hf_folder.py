"""Where the checkpoint folder that a `path:` names lies, and what it must hold before transformers reads it.

The only importer of huggingface_hub. Knows config.json and the names of files, and needs neither transformers
nor torch.
"""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from specctl.errors import SpecctlError, UsageError
from specctl.models.gguf_file import SUFFIX
from specctl.run_folder import read_json

CONFIG = "config.json"
_FILES = ["*.json", "*.safetensors", "*.model", "tokenizer*", "vocab*", "merges.txt"]
_CODE_AND_PICKLES = ["*.py", "*.bin", "*.pt", "*.pth", "*.pickle", "*.pkl"]


def find_folder(path: str) -> Path:
    """The folder or GGUF file that a `path:` names: here, or, for an `owner/name` that is neither, from the hub.

    What the hub's cache holds whole is taken as it is. Raises UsageError or SpecctlError, one line, where
    it cannot be had.
    """
    folder = Path(path)
    if folder.suffix == SUFFIX and not folder.exists():
        raise UsageError(f"the model file {folder} does not exist")
    if folder.exists() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path):
        return folder
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        raise UsageError(
            f"{path} is no folder here; to take it from the hub: pip install 'specctl[hf]', or download it yourself"
        ) from None
    chosen: dict[str, Any] = {"allow_patterns": _FILES, "ignore_patterns": _CODE_AND_PICKLES}
    with contextlib.suppress(LocalEntryNotFoundError):
        return Path(snapshot_download(path, local_files_only=True, **chosen))
    try:
        return Path(snapshot_download(path, **chosen))
    except (RepositoryNotFoundError, HFValidationError):
        raise UsageError(
            f"{path} is neither a folder here nor a model that the hub shows you; check the name, or log in with "
            "`hf auth login` if it is private or gated"
        ) from None
    except Exception as error:  # connections fail in the words of many libraries
        raise SpecctlError(
            f"{path} is no folder here and could not be fetched from the hub ({first_line(error)}); "
            "try again, or download it and give the folder"
        ) from None


def first_line(error: Exception) -> str:
    """What another library says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; UsageError naming it where it is missing, broken or no object."""
    path = folder / CONFIG
    if not path.is_file():
        inside = next(iter(sorted(folder.glob(f"*{SUFFIX}"))), None)
        hint = f"; for the GGUF file in it, give {inside}" if inside else ""
        raise UsageError(f"{path} is missing; a checkpoint folder holds {CONFIG} and model.safetensors{hint}")
    config = read_json(path)
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds {json.dumps(config)[:40]}; a {CONFIG} is an object with a model_type")
    return config


def check_folder(folder: Path) -> str:
    """The model_type of a folder of safetensors weights. Raises UsageError, naming the file, for any other."""
    kind = _model_type(folder)
    if any(folder.glob("*.safetensors")):
        return kind
    if any(folder.glob("*.bin")):
        convert = (
            "python -c 'from transformers import AutoModelForCausalLM as M; "
            f'M.from_pretrained("{folder}").save_pretrained("{folder}")\''
        )
        raise UsageError(f"{folder} has only pickled weights (.bin), which are not read; convert them with: {convert}")
    raise UsageError(f"{folder} holds no .safetensors file; a checkpoint folder holds config.json and safetensors")


def _model_type(folder: Path) -> str:
    path = folder / CONFIG
    if not path.is_file():
        raise UsageError(f"{path} is missing; a checkpoint folder holds config.json and safetensors weights")
    config = read_json(path)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(f"{path} does not say its model_type; it is no checkpoint of transformers")
    kind = str(config["model_type"])
    if config.get("quantization_config"):
        raise UsageError(f"{path} is of a quantised model; quantised weights are not read")
    if config.get("is_encoder_decoder"):
        raise UsageError(f"{folder} holds an encoder-decoder ({kind}); speculation needs a decoder alone")
    return kind
