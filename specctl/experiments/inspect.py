"""What models are and whether they can speculate together, told from their files without loading them.

Reads config.json, the tokenizer and the headers of the safetensors files, or of one GGUF file: a moment at any size.
Medusa heads are told by their config.json, and held against the target's sizes. Knows nothing about which
architectures decoding supports, and asks where the dtype of a cache depends on it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.config import NgramConfig, RunConfig, RuntimeConfig
from specctl.errors import UsageError
from specctl.models.files import open_files
from specctl.models.headers import ORIGINAL_HEADS, SINGLE, TensorHeader, has_weights, read_header, weight_files
from specctl.models.hf_folder import CONFIG, find_folder
from specctl.tokenizer import Tokenizer

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}

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
class StorageFacts:
    """The tensors on disk in one dtype, or one way of quantising: how many, and their bytes."""

    dtype: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """bytes_on_disk: of the weight files; bytes_in_run: of the parameters in the run's dtype.

    dtype: the one that most bytes on disk are of; storage: all of them, most bytes first.
    kv_bytes_per_token: cached for each token, in kv_dtype, which the
    engine decides that would run it, and context_length in tokens; None where config.json does not tell, and for
    heads. num_padding_rows: vocabulary rows beyond the tokenizer's entries (the target's, for heads). hidden_size: 0
    where config.json does not tell.
    """

    name: str
    folder: str
    architecture: str
    num_parameters: int
    bytes_on_disk: int
    bytes_in_run: int
    dtype: str
    storage: list[StorageFacts]
    kv_bytes_per_token: int | None
    kv_dtype: str | None
    context_length: int | None
    num_entries: int
    num_rows: int
    num_padding_rows: int
    hidden_size: int


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
    """The models of a run, the target first, and the names of drafters that are not trained yet.

    Raises UsageError where there is no target yet.
    """
    folder = Path(config.run_dir)
    target = find_folder(config.target.path) if config.target.path else folder / "target"
    if not config.target.path and not (target / CONFIG).is_file():
        raise UsageError(f"{folder} has no target yet; train it (specctl train-target), or give a folder to inspect")
    found, missing = [Source(name="target", folder=target)], []
    for name, drafter in config.drafters.items():
        if isinstance(drafter, NgramConfig):
            continue
        own = find_folder(drafter.path) if drafter.path else folder / "drafters" / name
        if drafter.path or (own / CONFIG).is_file():
            intersection = getattr(drafter, "vocabulary", "same") == "intersection"
            found.append(Source(name=name, folder=own, intersection=intersection))
        else:
            missing.append(name)
    return found, missing


def inspect(sources: Sequence[Source], runtime: RuntimeConfig) -> Inspection:
    """Look at a target and, against it, each of its drafts. Raises UsageError for a folder that is not a model."""
    configs = [_config(source) for source in sources]
    if _are_heads(configs[0]):
        raise UsageError(f"{sources[0].folder} holds Medusa heads; give their target first, and them as its draft")
    mine = open_files(sources[0].folder).tokenizer()
    target = _facts(sources[0], configs[0], mine, runtime)
    models, pairs = [target], []
    for source, config in zip(sources[1:], configs[1:], strict=True):
        if _are_heads(config):
            models.append(_head_facts(source, config, mine, runtime))
            pairs.append(_compare_heads(target, models[-1]))
        else:
            theirs = open_files(source.folder).tokenizer()
            models.append(_facts(source, config, theirs, runtime))
            pairs.append(_compare(target, mine, models[-1], theirs, source.intersection))
    can_speculate = all(pair.can_speculate for pair in pairs)
    return Inspection(run_dtype=runtime.dtype, models=models, pairs=pairs, can_speculate=can_speculate)


def _config(source: Source) -> dict[str, Any]:
    """The fields of a model's config.json, or what its GGUF file says of them."""
    if not source.folder.exists():
        raise UsageError(f"{source.name}: the model folder {source.folder} does not exist")
    config = open_files(source.folder).config()
    if isinstance(config.get("text_config"), dict):  # a model of text and more: its language model
        config = {**config, **config["text_config"]}
    return config


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


def _compare_heads(target: ModelFacts, heads: ModelFacts) -> PairFacts:
    can = (heads.num_rows, heads.hidden_size) == (target.num_rows, target.hidden_size)
    reason = f"heads on its hidden states, {heads.hidden_size:,} wide"
    if not can:
        reason = (
            f"heads on hidden states {heads.hidden_size:,} wide with {heads.num_rows:,} vocabulary rows, where the "
            f"target has {target.hidden_size:,} and {target.num_rows:,}"
        )
    return PairFacts(draft=heads.name, can_speculate=can, reason=reason, num_shared=target.num_entries if can else 0)


def _facts(source: Source, config: dict[str, Any], tokenizer: Tokenizer, runtime: RuntimeConfig) -> ModelFacts:
    files = open_files(source.folder)
    path = files.config_path
    num_rows = _number(path, config, ("vocab_size",))
    if num_rows is None:
        raise UsageError(f"{path} lacks vocab_size")
    tied = config.get("tie_word_embeddings") is True
    weights = _weights(files.weight_files(), files.headers(), runtime, tied)
    kv_numbers = _kv_numbers(path, config)
    kv_dtype = None if kv_numbers is None else _cache_dtype(source.folder, runtime)
    return ModelFacts(
        name=source.name,
        folder=str(source.folder),
        architecture=_architecture(config),
        kv_bytes_per_token=None if kv_numbers is None or kv_dtype is None else kv_numbers * _BYTES[kv_dtype],
        kv_dtype=kv_dtype,
        context_length=_number(path, config, _CONTEXT),
        num_entries=tokenizer.vocab_size,
        num_rows=num_rows,
        num_padding_rows=num_rows - tokenizer.vocab_size,
        hidden_size=_number(path, config, _WIDTH) or 0,
        **weights,
    )


def _are_heads(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


def _head_facts(source: Source, config: dict[str, Any], tokenizer: Tokenizer, runtime: RuntimeConfig) -> ModelFacts:
    """Of Medusa heads: the tokenizer is the target's, and sizes are those of the first head's output matrix."""
    files = weight_files(source.folder, ORIGINAL_HEADS if has_weights(source.folder, ORIGINAL_HEADS) else SINGLE)
    output = next(
        (shape for file in files for name, (_, shape, _) in read_header(file).items() if _OUTPUT.fullmatch(name)), ()
    )
    if len(output) != 2:
        raise UsageError(f"{source.folder} lacks the output matrix of its first head")
    return ModelFacts(
        name=source.name,
        folder=str(source.folder),
        architecture="MedusaModel",
        kv_bytes_per_token=None,
        kv_dtype=None,
        context_length=None,
        num_entries=tokenizer.vocab_size,
        num_rows=output[0],
        num_padding_rows=output[0] - tokenizer.vocab_size,
        hidden_size=output[1],
        **_weights(files, (tensor for file in files for tensor in read_header(file).items()), runtime),
    )


_OUTPUT = re.compile(r"(medusa_heads\.)?lm_heads\.0\.weight|(medusa_head\.)?0\.\d+\.weight")


def _weights(
    files: Sequence[Path], tensors: Iterable[tuple[str, TensorHeader]], runtime: RuntimeConfig, tied: bool = False
) -> dict[str, Any]:
    """The fields of `ModelFacts` that weight files tell. tied: whether an output matrix counts as the embedding."""
    num_parameters, dtypes, counts = 0, Counter[str](), Counter[str]()
    for name, tensor in tensors:
        dtypes[tensor.dtype] += tensor.num_bytes
        counts[tensor.dtype] += 1
        counted = not (tied and name == "lm_head.weight") and not name.endswith("rotary_emb.inv_freq")
        num_parameters += tensor.num_values if counted else 0
    return {
        "storage": [
            StorageFacts(dtype=dtype, num_tensors=counts[dtype], num_bytes=size) for dtype, size in dtypes.most_common()
        ],
        "num_parameters": num_parameters,
        "bytes_on_disk": sum(file.stat().st_size for file in files),
        "bytes_in_run": num_parameters * _BYTES[runtime.dtype],
        "dtype": dtypes.most_common(1)[0][0] if dtypes else "none",
    }


def _cache_dtype(folder: Path, runtime: RuntimeConfig) -> str:
    """The dtype that a model's keys and values would be held in, by the engine that would run it here.

    Only in bfloat16 do engines differ, and only then is torch needed to tell.
    """
    if runtime.dtype != "bfloat16":
        return runtime.dtype
    from specctl.models.backend import cache_dtype

    return cache_dtype(folder, runtime)


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
