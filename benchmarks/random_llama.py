"""A random Llama of real size, written as a folder: what size costs, without a download.

    python -m benchmarks.random_llama FOLDER [--width 1024] [--layers 16] [--rows 152064]

About 370M parameters of bfloat16, tied, with more rows than its tokenizer has entries, as padded checkpoints have.
Its text is noise.
"""

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file

from specctl.builtin_text import python_stdlib
from specctl.models.families import CONFIG, config_of
from specctl.models.llama import Llama, LlamaShape
from specctl.run_folder import write_json
from specctl.tokenizer import Tokenizer


def shape_of(width: int, layers: int, rows: int) -> LlamaShape:
    return LlamaShape(
        vocab_size=rows,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 256),
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )


def write(folder: Path, shape: LlamaShape) -> None:
    """config.json, model.safetensors and a tokenizer of at most 4,096 entries, the same at every call."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        module = Llama(shape)
    tensors = {}
    for name, weight in module.named_parameters():
        values = torch.ones(weight.shape, dtype=torch.bfloat16)
        tensors[name] = values.normal_(0, 0.02, generator=generator) if weight.dim() == 2 else values
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer.train(islice(python_stdlib(), 100), min(4096, shape.vocab_size))
    tokenizer.save(folder)
    special = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    write_json(folder / CONFIG, {**config_of(shape), "torch_dtype": "bfloat16", **special})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, default=152_064)
    options = parser.parse_args(arguments)
    write(options.folder, shape_of(options.width, options.layers, options.rows))


if __name__ == "__main__":
    main()
