"""What a model's path holds: a checkpoint folder, or one GGUF file, behind one interface.

The one place that tells the two apart. `open_files` is all that others call; what a config.json means is
`families`'s, whichever of the two it came from. Needs no torch but for `weights`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specctl.chat import ChatTemplate
from specctl.errors import UsageError
from specctl.models.gguf_config import config_of, weights_of
from specctl.models.gguf_file import SUFFIX, read_gguf
from specctl.models.gguf_tokenizer import chat_template_of, end_tokens_of, tokenizer_of
from specctl.models.headers import TensorHeader, read_header, weight_files
from specctl.models.hf_folder import CONFIG, read_config
from specctl.run_folder import read_json
from specctl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specctl.models.gguf_weights import GgufWeights
    from specctl.models.llama import LlamaShape
    from specctl.models.weights import Weights


class ModelFiles(Protocol):
    """A model on disk. Each method raises UsageError, naming the file, for what is missing or makes no sense.

    path: as messages name it. config_path: the file that `config` comes from.
    """

    path: Path
    config_path: Path

    def config(self) -> dict[str, Any]:
        """The fields of a config.json."""

    def weight_files(self) -> list[Path]:
        """The files that hold the weights."""

    def hashed_files(self) -> list[Path]:
        """All files whose bytes decide the weights, those of Medusa heads too."""

    def headers(self) -> Iterator[tuple[str, TensorHeader]]:
        """Every tensor, by its name on disk."""

    def weights(self, shape: "LlamaShape") -> "Weights | GgufWeights":
        """The tensors by their Hugging Face names, still on disk."""

    def tokenizer(self) -> Tokenizer: ...

    def end_tokens(self) -> frozenset[int]:
        """The end tokens that the files name, beside the tokenizer's own."""

    def chat_template(self) -> ChatTemplate: ...


def open_files(path: Path) -> ModelFiles:
    """The files behind a path; nothing is read yet."""
    return GgufFile(path) if is_gguf(path) else Folder(path)


def is_gguf(path: Path) -> bool:
    """Whether a path is taken for a GGUF file rather than for a folder: by its name, or since it is a file."""
    return not path.is_dir() and (path.suffix == SUFFIX or path.is_file())


class Folder:
    """A folder of config.json, safetensors and tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self.path, self.config_path = path, path / CONFIG

    def config(self) -> dict[str, Any]:
        return read_config(self.path)

    def weight_files(self) -> list[Path]:
        return weight_files(self.path)

    def hashed_files(self) -> list[Path]:
        return sorted(self.path.glob("*.safetensors"))

    def headers(self) -> Iterator[tuple[str, TensorHeader]]:
        for file in self.weight_files():
            yield from read_header(file).items()

    def weights(self, shape: "LlamaShape") -> "Weights":
        from specctl.models.weights import Weights

        return Weights(self.path)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path)

    def end_tokens(self) -> frozenset[int]:
        """Those that generation_config.json, or else config.json, names."""
        for name in ("generation_config.json", CONFIG):
            if (self.path / name).is_file():
                config = read_json(self.path / name)
                value = config.get("eos_token_id") if isinstance(config, dict) else None
                if value is not None:
                    ids = value if isinstance(value, list) else [value]
                    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
                        wrong = f"eos_token_id is {value!r}; it must be one or more token ids"
                        raise UsageError(f"{self.path / name}: {wrong}")
                    return frozenset(ids)
        return frozenset()

    def chat_template(self) -> ChatTemplate:
        return ChatTemplate.load(self.path)


class GgufFile:
    """One file that holds everything: metadata, vocabulary and tensors, most of them quantised."""

    def __init__(self, path: Path) -> None:
        self.path = self.config_path = path

    def config(self) -> dict[str, Any]:
        return config_of(read_gguf(self.path), self.path)

    def weight_files(self) -> list[Path]:
        return [self.path]

    def hashed_files(self) -> list[Path]:
        return [self.path]

    def headers(self) -> Iterator[tuple[str, TensorHeader]]:
        for name, tensor in weights_of(read_gguf(self.path)).items():
            yield name, TensorHeader(tensor.storage.name, tensor.shape, tensor.num_bytes)

    def weights(self, shape: "LlamaShape") -> "GgufWeights":
        from specctl.models.gguf_weights import GgufWeights

        return GgufWeights(self.path, read_gguf(self.path), shape)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(read_gguf(self.path), self.path)

    def end_tokens(self) -> frozenset[int]:
        return end_tokens_of(read_gguf(self.path), self.path)

    def chat_template(self) -> ChatTemplate:
        return chat_template_of(read_gguf(self.path), self.path)
