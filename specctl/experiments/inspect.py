"""What models are and whether they can speculate together, told from their folders without loading them.

Reads config.json, the tokenizer and the headers of the safetensors files; a folder of any size takes a moment.
Knows nothing about which architectures decoding supports.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.config import DraftModelConfig, RunConfig
from specctl.errors import UsageError
from specctl.run_folder import read_json
from specctl.tokenizer import Tokenizer

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
_LONGEST_HEADER = 100_000_000  # bytes, by the format's own rule

# The names of the same number in the configs of different architectures.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model to inspect. intersection: whether a draft may have another tokenizer than the target."""

    name: str
    folder: Path
    intersection: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """bytes_on_disk: of the weight files; bytes_in_run: of the parameters in the run's dtype.

    dtype: the one that most bytes on disk are of. kv_bytes_per_token: cached for each token in the run's dtype, and
    context_length in tokens; None where config.json does not tell. num_padding_rows: vocabulary rows beyond the
    tokenizer's entries.
    """

    name: str
    folder: str
    architecture: str
    num_parameters: int
    bytes_on_disk: int
    bytes_in_run: int
    dtype: str
    kv_bytes_per_token: int | None
    context_length: int | None
    num_entries: int
    num_rows: int
    num_padding_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFacts:
    """num_shared: tokens that mean the same to target and draft."""

    draft: str
    can_speculate: bool
    reason: str
    num_shared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The target first among the models, then its drafts. run_dtype: what bytes in a run are counted in."""

    run_dtype: str
    models: list[ModelFacts]
    pairs: list[PairFacts]
    can_speculate: bool


def sources_of(config: RunConfig) -> tuple[list[Source], list[str]]:
    """The models of a run, the target first, and the names of draft models that are not trained yet.

    Raises UsageError where there is no target yet.
    """
    folder = Path(config.run_dir)
    target = Path(config.target.path) if config.target.path else folder / "target"
    if not config.target.path and not (target / "config.json").is_file():
        raise UsageError(f"{folder} has no target yet; train it (specctl train-target), or give a folder to inspect")
    found, missing = [Source(name="target", folder=target)], []
    for name, drafter in config.drafters.items():
        if not isinstance(drafter, DraftModelConfig):
            continue
        own = Path(drafter.path) if drafter.path else folder / "drafters" / name
        if drafter.path or (own / "config.json").is_file():
            found.append(Source(name=name, folder=own, intersection=drafter.vocabulary == "intersection"))
        else:
            missing.append(name)
    return found, missing


def inspect(sources: Sequence[Source], run_dtype: str) -> Inspection:
    """Look at a target and, against it, each of its drafts. Raises UsageError for a folder that is not a model."""
    tokenizers = [_tokenizer(source) for source in sources]
    models = [_facts(*each, run_dtype) for each in zip(sources, tokenizers, strict=True)]
    pairs = [
        _compare(models[0], tokenizers[0], model, tokenizer, source.intersection)
        for source, model, tokenizer in zip(sources[1:], models[1:], tokenizers[1:], strict=True)
    ]
    can_speculate = all(pair.can_speculate for pair in pairs)
    return Inspection(run_dtype=run_dtype, models=models, pairs=pairs, can_speculate=can_speculate)


def _tokenizer(source: Source) -> Tokenizer:
    if not source.folder.is_dir():
        raise UsageError(f"{source.name}: the model folder {source.folder} does not exist")
    return Tokenizer.load(source.folder)


def _compare(
    target: ModelFacts, mine: Tokenizer, draft: ModelFacts, theirs: Tokenizer, intersection: bool
) -> PairFacts:
    same = mine.fingerprint() == theirs.fingerprint()
    num_shared = mine.vocab_size if same else len(mine.shared_with(theirs))
    short = next((model for model in (target, draft) if model.num_padding_rows < 0), None)
    can, shared = short is None, f"the {num_shared:,} of {target.num_entries:,} tokens that both have"
    if short is not None:
        reason = f"{short.name} has {short.num_rows:,} vocabulary rows for {short.num_entries:,} tokenizer entries"
    elif same and target.num_rows == draft.num_rows:
        reason = "the same tokenizer"
    elif same:
        rows = f"{target.num_rows:,} and {draft.num_rows:,} rows for {mine.vocab_size:,} entries"
        reason = f"the same tokenizer, padded differently ({rows})"
    else:
        can = intersection and num_shared > 0
        reason = f"different tokenizers ({mine.first_difference(theirs)})"
        if num_shared == 0:
            reason += ", which share no token"
        elif intersection:
            reason += f": it drafts {shared}"
        else:
            reason += f"; vocabulary: intersection would draft {shared}"
    return PairFacts(draft=draft.name, can_speculate=can, reason=reason, num_shared=num_shared)


def _facts(source: Source, tokenizer: Tokenizer, run_dtype: str) -> ModelFacts:
    path = source.folder / "config.json"
    config = read_json(path)
    if not isinstance(config, dict):
        raise UsageError(f"{path} does not describe a model")
    if isinstance(config.get("text_config"), dict):  # a model of text and more: its language model
        config = {**config, **config["text_config"]}
    num_rows = _number(path, config, ("vocab_size",))
    if num_rows is None:
        raise UsageError(f"{path} lacks vocab_size")
    num_parameters, dtypes, bytes_on_disk = 0, Counter[str](), 0
    for file in _weight_files(source.folder):
        bytes_on_disk += file.stat().st_size
        for name, (dtype, count, num_bytes) in read_header(file).items():
            dtypes[dtype] += num_bytes
            tied = name == "lm_head.weight" and config.get("tie_word_embeddings") is True
            num_parameters += 0 if tied or name.endswith("rotary_emb.inv_freq") else count
    kv_numbers = _kv_numbers(path, config)
    return ModelFacts(
        name=source.name,
        folder=str(source.folder),
        architecture=_architecture(config),
        num_parameters=num_parameters,
        bytes_on_disk=bytes_on_disk,
        bytes_in_run=num_parameters * _BYTES[run_dtype],
        dtype=dtypes.most_common(1)[0][0] if dtypes else "none",
        kv_bytes_per_token=None if kv_numbers is None else kv_numbers * _BYTES[run_dtype],
        context_length=_number(path, config, _CONTEXT),
        num_entries=tokenizer.vocab_size,
        num_rows=num_rows,
        num_padding_rows=num_rows - tokenizer.vocab_size,
    )


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else str(config.get("model_type", "unknown"))


def _number(path: Path, config: dict[str, Any], names: Sequence[str]) -> int | None:
    """The first of these fields that is there. Raises UsageError where it is no count."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise UsageError(f"{path}: {name} is {value!r}; it must be a whole number above 0")
            return value
    return None


def _kv_numbers(path: Path, config: dict[str, Any]) -> int | None:
    """How many numbers a plain cache of keys and values holds for a token; None where that cannot be told."""
    layers, heads, width = (_number(path, config, names) for names in (_LAYERS, _HEADS, _WIDTH))
    if layers is None or heads is None or width is None or "kv_lora_rank" in config:
        return None
    kv_heads = 1 if config.get("multi_query") is True else _number(path, config, _KV_HEADS) or heads
    return 2 * layers * kv_heads * (_number(path, config, ("head_dim",)) or width // heads)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, sharded or not. Raises UsageError where one is missing."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        pickled = any(folder.glob("*.bin"))
        why = (
            "; weights in .bin files are pickles, which are never read: convert them to safetensors" if pickled else ""
        )
        raise UsageError(f"{folder} has neither {whole.name} nor {index.name}{why}")
    content = read_json(index)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not all(_is_file_name(name) for name in shards.values()):
        raise UsageError(f"{index} names no shards (weight_map)")
    names = sorted(set(shards.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UsageError(f"{folder} lacks {missing[0]}, one of {len(missing)} missing shards of {len(names)}")
    return [folder / name for name in names]


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name == Path(name).name


def read_header(path: Path) -> dict[str, tuple[str, int, int]]:
    """(dtype, count of numbers, bytes) of each tensor in a safetensors file, from its header alone.

    Raises UsageError, naming the file, where it is truncated or no such file.
    """
    found, size = {}, path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"its header of {length} bytes does not fit")
            header = json.loads(file.read(length).decode("utf-8"))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            count = 1
            for width in tensor["shape"]:
                count *= int(width)
            begin, end = tensor["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(f"{name} lies beyond its end")
            found[name] = (_DTYPES.get(tensor["dtype"], str(tensor["dtype"]).lower()), count, end - begin)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error}); it is truncated or not safetensors") from None
    return found
