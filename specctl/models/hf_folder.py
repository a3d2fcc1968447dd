"""What a checkpoint folder must hold, and must not, before transformers reads it.

Knows config.json and the names of files, and needs no transformers.
"""

from pathlib import Path

from specctl.errors import UsageError
from specctl.run_folder import read_json


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
    path = folder / "config.json"
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
