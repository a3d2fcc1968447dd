"""What a run file may say: every section, every default once, every field with its unit.

Reads YAML into frozen pydantic models; all errors are reported at once, each with its path and, for
an unknown key, the nearest valid one. Knows nothing about what the values are used for.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specctl.errors import UsageError


class Section(BaseModel):
    """A part of the run file: frozen, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class RuntimeConfig(Section):
    device: str = Field("auto", description="auto (a GPU if there is one), cpu, cuda, cuda:N or mps")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("float32", description="of weights and caches in decoding")
    threads: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="CPU threads; auto: all cores for training, the faster of 1 and all for decoding"
    )


class TokenizerConfig(Section):
    vocab_size: int = Field(1024, ge=257, description="entries of the byte-level BPE; 257 means bytes")
    corpus: str | None = Field(None, description="name of the corpus that it is trained on; the target's if not given")


class CorpusConfig(Section):
    builtin: Literal["python-stdlib", "python-docs"] | None = Field(None, description="text that every Python has")
    paths: tuple[str, ...] = Field((), description="files and folders, instead of builtin")
    validation_fraction: float = Field(0.05, gt=0, lt=1, description="share of documents kept for validation")

    @model_validator(mode="after")
    def _one_source(self) -> "CorpusConfig":
        if (self.builtin is None) == (not self.paths):
            raise ValueError("give either builtin or paths")
        return self


class ModelConfig(Section):
    hidden_size: int = Field(192, ge=1)
    num_hidden_layers: int = Field(6, ge=1)
    num_attention_heads: int = Field(3, ge=1)
    num_key_value_heads: int = Field(1, ge=1)
    intermediate_size: int = Field(512, ge=1)
    head_dim: int = Field(64, ge=2, multiple_of=2, description="64 or more for vLLM")
    max_position_embeddings: int = Field(512, ge=2, description="context, tokens")
    rope_theta: float = Field(10000.0, gt=0)
    rms_norm_eps: float = Field(1e-5, gt=0)
    tie_word_embeddings: bool = True

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self


class TrainingConfig(Section):
    loss: Literal["ce", "kl"] = Field("ce", description="ce: next token of the text; kl: the target's distribution")
    steps: int = Field(1000, ge=1)
    batch_size: int = Field(8, ge=1, description="blocks a step")
    block_size: int = Field(128, ge=1, description="tokens a block")
    learning_rate: float = Field(3e-3, gt=0, description="peak, AdamW")
    final_learning_rate: float = Field(0.05, ge=0, le=1, description="end of the cosine, as a share of the peak")
    warmup_steps: int = Field(100, ge=0)
    weight_decay: float = Field(0.1, ge=0)
    beta2: float = Field(0.98, gt=0, lt=1)
    gradient_clip: float = Field(1.0, gt=0, description="largest gradient norm")
    dropout: float = Field(0.0, ge=0, lt=1)
    eval_interval: int = Field(500, ge=1, description="steps between validation losses")
    eval_blocks: int = Field(64, ge=1, description="validation blocks, spread evenly")
    seed: int = Field(0, ge=0, description="of the weights and of the order of the text")


class TargetConfig(Section):
    corpus: str | None = Field(None, description="name of the corpus to train on; also where prompts come from")
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    path: str | None = Field(None, description="a checkpoint folder, used instead of training")


class DrafterConfig(Section):
    kind: Literal["draft_model"] = "draft_model"
    corpus: str | None = Field(None, description="name of the corpus to train on; the target's if not given")
    model: ModelConfig = ModelConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, intermediate_size=192
    )
    training: TrainingConfig = TrainingConfig()
    path: str | None = Field(None, description="a checkpoint folder, used instead of training")


class DecodingConfig(Section):
    drafter: str = Field("distilled", description="a name under drafters, or none for plain decoding")
    num_speculative_tokens: int = Field(4, ge=0, le=60, description="K, tokens drafted a round")
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0 keeps all")
    max_new_tokens: int = Field(256, ge=0)
    prompt: str = Field("def ", description="what generate continues")


class SweepConfig(Section):
    k: tuple[Annotated[int, Field(ge=0, le=60)], ...] = Field(tuple(range(9)), min_length=1, description="K to measure")
    num_prompts: int = Field(4, ge=1, description="prompts, from the validation split")
    prompt_tokens: int = Field(32, ge=1, description="tokens of each prompt")
    max_new_tokens: int = Field(128, ge=2, description="tokens generated a run; end tokens are ignored")
    repeats: int = Field(3, ge=1, description="times that each K runs on each prompt")


class RunConfig(Section):
    run_dir: str = Field("runs/tiny", min_length=1, description="where everything that a run makes lies")
    seed: int = Field(0, ge=0, description="of the draws in decoding and the choice of prompts")
    runtime: RuntimeConfig = RuntimeConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    corpora: dict[str, CorpusConfig] = {}
    target: TargetConfig
    drafters: dict[str, DrafterConfig] = {}
    decoding: DecodingConfig = DecodingConfig()
    sweep: SweepConfig = SweepConfig()

    @model_validator(mode="after")
    def _names_resolve(self) -> "RunConfig":
        problems = _name_problems(self.model_dump())
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _name_problems(tree: dict[str, Any]) -> list[str]:
    """What is wrong with the names in a run file, whole or, beside other errors, as it was written."""

    def section(parent: Any, name: str) -> dict[str, Any]:
        found = parent.get(name) if isinstance(parent, dict) else None
        return found if isinstance(found, dict) else {}

    problems: list[str] = []

    def check(path: str, name: Any, known: Sequence[str], what: str) -> None:
        if isinstance(name, str) and name not in known:
            problems.append(f"{path}: no {what} is named {name!r}{_nearest(name, known)}")

    corpora, drafters = [str(name) for name in section(tree, "corpora")], section(tree, "drafters")
    drafter = section(tree, "decoding").get("drafter", DecodingConfig().drafter)
    check("tokenizer.corpus", section(tree, "tokenizer").get("corpus"), corpora, "corpus")
    check("target.corpus", section(tree, "target").get("corpus"), corpora, "corpus")
    check("decoding.drafter", drafter, [*map(str, drafters), "none"], "drafter")
    for name in map(str, drafters):
        check(f"drafters.{name}.corpus", section(drafters, name).get("corpus"), corpora, "corpus")
        if name in ("none", "baseline"):
            problems.append(f"drafters.{name}: the name is taken by plain decoding; choose another")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            problems.append(f"drafters.{name}: a name may hold letters, digits, '_', '.' and '-'")
    if section(tree, "target").get("corpus") is None:
        problems.append("target.corpus: needed (prompts come from it, also where target.path is given)")
    return problems


def default_config_path() -> Path:
    """The tiny config, from the installed package or the repository."""
    package = Path(__file__).parent
    installed = package / "configs" / "tiny.yaml"
    return installed if installed.is_file() else package.parent / "configs" / "tiny.yaml"


def load_config(path: Path, overrides: Sequence[str] = (), values: dict[str, Any] | None = None) -> RunConfig:
    """Read a run file, apply `section.field=value` overrides (YAML values), then plain `values` by path.

    Raises UsageError that lists every problem, one a line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"config {path} does not exist; leave -c out for the built-in tiny run") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"config {path} cannot be read: {error}") from None
    tree = _parse(text, str(path))
    if not isinstance(tree, dict):
        raise UsageError(f"config {path} is empty or not a mapping; it needs at least a target section")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {override}: write it as section.field=value")
        _put(tree, key, _parse(value, f"--set {key}"))
    for key, value in (values or {}).items():
        _put(tree, key, value)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = [line for detail in error.errors() for line in _describe(dict(detail))]
        if not any(detail["loc"] == () for detail in error.errors()):  # pydantic looks at names only where the rest is
            lines += _name_problems(tree)
        raise UsageError(f"config {path}:\n" + "\n".join(f"  - {line}" for line in lines)) from None


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number and a duplicate key is an error."""


_Loader.yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _construct_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader underneath
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{where}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{where}: not YAML ({error})") from None


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, field = key.split(".")
    node = tree
    for name in sections:
        child = node.get(name)
        # A copy: YAML anchors make several sections one object, and only this one is meant.
        node[name] = dict(child) if isinstance(child, dict) else {}
        node = node[name]
    node[field] = value


def _describe(detail: dict[str, Any]) -> list[str]:
    location = [str(part) for part in detail["loc"]]
    path = ".".join(location)
    if detail["type"] == "extra_forbidden":
        return [f"{path}: unknown key{_nearest_key(location)}"]
    if detail["type"] == "missing":
        return [f"{path}: needed, and not given"]
    if detail["type"] == "value_error":
        text = str(detail["ctx"]["error"])
        return [f"{path}: {text}"] if path else text.splitlines()
    # A field of several types reports once for each; its own name is enough.
    parts = [part for part in location if part not in ("int", "constrained-int") and not part.startswith("literal")]
    return [f"{'.'.join(parts)}: {detail['msg'][0].lower()}{detail['msg'][1:]}, not {detail['input']!r}"]


def _fields_at(location: Sequence[str]) -> list[str]:
    """The field names of the section that a YAML path leads to."""
    section: type[Section] = RunConfig
    for name in location:
        if section is RunConfig and name in ("corpora", "drafters"):
            section = CorpusConfig if name == "corpora" else DrafterConfig
            continue
        annotation = section.model_fields[name].annotation if name in section.model_fields else None
        if isinstance(annotation, type) and issubclass(annotation, Section):
            section = annotation
    return list(section.model_fields)


def _nearest_key(location: Sequence[str]) -> str:
    """A hint for an unknown key: where a field of that name is at home, or else the nearest name in its section."""
    *section, name = location
    known = _fields_at(section)
    paths = list(_field_paths(RunConfig, ()))
    if difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return _nearest(name, known)
    wanted = [name]
    if all(path[-1] != name for path in paths) and not difflib.get_close_matches(name, known, n=1, cutoff=0.5):
        wanted = difflib.get_close_matches(name, [path[-1] for path in paths], n=1, cutoff=0.8)
    homes = [path for path in paths if path[-1] in wanted]
    if not homes:
        return _nearest(name, known)
    home = max(homes, key=lambda path: _num_shared(path, section))
    return f"; did you mean {'.'.join(_filled_in(home, section))!r}?"


def _field_paths(section: type[Section], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every field's path; NAME stands for the names of corpora and drafters."""
    for name, field in section.model_fields.items():
        if section is RunConfig and name in ("corpora", "drafters"):
            named: type[Section] = CorpusConfig if name == "corpora" else DrafterConfig
            yield from _field_paths(named, (*path, name, "NAME"))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _field_paths(field.annotation, (*path, name))
        else:
            yield (*path, name)


def _num_shared(path: Sequence[str], section: Sequence[str]) -> int:
    shared = [mine in (theirs, "NAME") for mine, theirs in zip(path, section, strict=False)]
    return (*shared, False).index(False)


def _filled_in(path: Sequence[str], section: Sequence[str]) -> list[str]:
    """The path with NAME replaced where the section gives it."""
    if path[1:2] == ("NAME",) and section[:1] == [path[0]] and len(section) > 1:
        return [path[0], section[1], *path[2:]]
    return list(path)


def _nearest(name: str, known: Sequence[str]) -> str:
    """A hint: the nearest known name, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known)}" if known else ""
