"""What a run file may say: every section, every default once, every field with its unit.

Frozen pydantic models; `config_file.py` reads YAML into them. Knows nothing about what the values
are used for.
"""

import difflib
import math
import os
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator


class Section(BaseModel):
    """A part of the run file: frozen; unknown keys, infinite numbers and NaN are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


Backend = Literal["auto", "native", "transformers"]


class RuntimeConfig(Section):
    device: str = Field("auto", description="auto (a GPU if there is one), cpu, cuda, cuda:N or mps")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("float32", description="of weights and caches in decoding")
    kernel: Literal["auto", True, False] = Field(
        "auto", description="a CPU's passes through our C++ function, built at first use; auto: where it can be"
    )
    compile: bool = Field(
        False, description="decode through torch.compile: minutes at the start, told, and outside every timing"
    )
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = Field(
        "auto",
        description="CPU threads; auto: all cores for training; one, half or all for decoding, timed once",
    )
    backend: Backend = Field(
        "auto", description="what runs a model: our own decoder (native) or transformers; auto: native where it can"
    )

    @model_validator(mode="after")
    def _one_engine(self) -> "RuntimeConfig":
        if self.compile and self.kernel is True:
            raise ValueError("kernel and compile exclude each other; leave one of them out")
        return self


class TokenizerConfig(Section):
    vocab_size: int = Field(1024, ge=257, description="entries of the byte-level BPE; 257 means bytes")
    corpus: str | None = Field(None, description="name of the corpus that it is trained on; the target's if not given")


class CorpusConfig(Section):
    builtin: Literal["python-stdlib", "python-docs"] | None = Field(None, description="text that every Python has")
    paths: tuple[str, ...] = Field((), description="files, folders and patterns such as notes/**/*.md")
    text_field: str = Field("text", min_length=1, description="the field of each .jsonl line that holds its text")
    generated_by: Literal["target"] | None = Field(None, description="text that the target itself writes")
    prompts: str | None = Field(
        None, description="a file of prompts that generated_by continues, in turn; stretches of target.corpus if none"
    )
    num_tokens: int = Field(200_000, ge=1, description="tokens that generated_by writes")
    validation_fraction: float = Field(0.05, gt=0, lt=1, description="share of documents kept for validation")

    @model_validator(mode="after")
    def _one_source(self) -> "CorpusConfig":
        if sum(map(bool, (self.builtin, self.paths, self.generated_by))) != 1:
            raise ValueError("give one of builtin, paths and generated_by")
        if self.prompts is not None and not self.generated_by:
            raise ValueError("prompts: only text that the target writes begins with prompts; add generated_by: target")
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


LossKind = Literal["ce", "kl", "acceptance"]


class TrainingConfig(Section):
    loss: LossKind = Field(
        "ce",
        description="ce: next token of the text; kl, acceptance: the target's distribution, by divergence or overlap",
    )
    steps: int = Field(1000, ge=1)
    batch_size: int = Field(8, ge=1, description="blocks a step")
    block_size: int = Field(128, ge=1, description="tokens a block")
    learning_rate: float = Field(3e-3, gt=0, description="peak, AdamW")
    final_learning_rate: float = Field(0.05, ge=0, le=1, description="end of the cosine, as a share of the peak")
    warmup_steps: int = Field(100, ge=0)
    weight_decay: float = Field(0.1, ge=0)
    beta2: float = Field(0.98, gt=0, lt=1)
    gradient_clip: float | None = Field(1.0, gt=0, description="largest gradient norm; null clips nothing")
    dropout: float = Field(0.0, ge=0, lt=1)
    eval_interval: int = Field(500, ge=1, description="steps between validation losses")
    eval_blocks: int = Field(64, ge=1, description="validation blocks, spread evenly")
    seed: int = Field(0, ge=0, lt=2**63, description="of the weights and of the order of the text")

    @field_validator("gradient_clip", mode="before")
    @classmethod
    def _null_is_no_clipping(cls, value: Any) -> Any:
        if value == math.inf:
            raise ValueError("no number is infinite here; null clips nothing")
        return value


class TargetTrainingConfig(TrainingConfig):
    """Training of the target, which has no other model to learn from."""

    loss: Literal["ce"] = Field("ce", description="ce: next token of the text")

    @field_validator("loss", mode="before")
    @classmethod
    def _no_teacher(cls, value: Any) -> Any:
        if value in get_args(LossKind) and value != "ce":
            raise ValueError(f"{value} learns from the target, so it is for drafters; give ce, or leave it out")
        return value


class TargetConfig(Section):
    corpus: str | None = Field(None, description="name of the corpus to train on; also where prompts come from")
    model: ModelConfig = ModelConfig()
    training: TargetTrainingConfig = TargetTrainingConfig()
    path: str | None = Field(
        None, description="a checkpoint folder, a .gguf file or a hub id, used instead of training"
    )


class DraftModelConfig(Section):
    """A small language model."""

    kind: Literal["draft_model"] = "draft_model"
    corpus: str | None = Field(None, description="name of the corpus to train on; the target's if not given")
    model: ModelConfig = ModelConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, intermediate_size=192
    )
    training: TrainingConfig = TrainingConfig()
    path: str | None = Field(
        None, description="a checkpoint folder, a .gguf file or a hub id, used instead of training"
    )
    vocabulary: Literal["same", "intersection"] = Field(
        "same", description="intersection: a path with another tokenizer drafts the tokens that both have"
    )


class MedusaTrainingConfig(TrainingConfig):
    """Training of heads: other defaults."""

    loss: LossKind = Field(
        "acceptance",
        description="ce: the tokens of the text; kl, acceptance: the target's distribution, by divergence or overlap",
    )
    learning_rate: float = Field(1e-2, gt=0, description="peak, AdamW")
    dropout: float = Field(0.0, ge=0, le=0, description="heads have none")


class NgramConfig(Section):
    """Prompt lookup: copies from the text itself, nothing to train."""

    kind: Literal["ngram"]
    prompt_lookup_max: int = Field(4, ge=1, description="longest suffix looked up, tokens")
    prompt_lookup_min: int = Field(1, ge=1, description="shortest suffix looked up, tokens")

    @model_validator(mode="after")
    def _min_below_max(self) -> "NgramConfig":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min is larger than prompt_lookup_max")
        return self


class MedusaConfig(Section):
    """Heads on the target's own hidden state."""

    kind: Literal["medusa"]
    num_heads: int = Field(4, ge=1, le=60, description="tokens that can be drafted a round")
    num_hidden_layers: int = Field(1, ge=0, description="residual layers of each head")
    original_lm_head: bool = Field(False, description="one output matrix for all heads, instead of one each")
    corpus: str | None = Field(None, description="name of the corpus to train on; the target's if not given")
    training: MedusaTrainingConfig = MedusaTrainingConfig()
    path: str | None = Field(None, description="a folder of heads, used instead of training")

    @model_validator(mode="after")
    def _blocks_hold_every_label(self) -> "MedusaConfig":
        if self.training.block_size < self.num_heads + 2:
            raise ValueError(f"training.block_size must be {self.num_heads + 2} or more for {self.num_heads} heads")
        return self


_DEFAULT_KIND = "draft_model"
DRAFTER_KINDS: dict[str, type[Section]] = {
    "draft_model": DraftModelConfig,
    "ngram": NgramConfig,
    "medusa": MedusaConfig,
}


def _kind_of(value: Any) -> Any:
    return value.get("kind", _DEFAULT_KIND) if isinstance(value, dict) else getattr(value, "kind", _DEFAULT_KIND)


DrafterConfig = Annotated[
    Annotated[DraftModelConfig, Tag("draft_model")]
    | Annotated[NgramConfig, Tag("ngram")]
    | Annotated[MedusaConfig, Tag("medusa")],
    Discriminator(_kind_of),
]


RuleName = Literal["token", "block", "typical"]
TokenId = Annotated[int, Field(ge=0)]

_LARGEST = 1e15
"""Of what is done to logits: with a logit, a count and each other these numbers stay far inside float32."""

LogitShift = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class DecodingConfig(Section):
    drafter: str = Field("distilled", description="a name under drafters, or none for plain decoding")
    num_speculative_tokens: int = Field(4, ge=0, le=60, description="K, tokens drafted a round")
    rule: RuleName = Field("token", description="token, block: exact; typical: LOSSY, another law than the target's")
    typical_epsilon: float = Field(0.09, ge=0, le=1, description="typical accepts above this probability")
    typical_delta: float = Field(0.3, ge=0, description="typical accepts above this times exp(-entropy) too")
    temperature: float = Field(1.0, ge=0, le=_LARGEST, description="0 is greedy")
    draft_temperature: float | None = Field(
        None, ge=0, le=_LARGEST, description="the draft's own; temperature if not given"
    )
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0 keeps all")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the likeliest tokens that reach this mass; 1 keeps all")
    min_p: float = Field(0.0, ge=0, le=1, description="drop tokens below this share of the likeliest; 0 keeps all")
    repetition_penalty: float = Field(
        1.0,
        ge=1 / _LARGEST,
        le=_LARGEST,
        description="divides positive logits of tokens in prompt or output, multiplies negative; 1 is off",
    )
    presence_penalty: LogitShift = Field(0.0, description="subtracted from the logits of tokens in the output")
    frequency_penalty: LogitShift = Field(0.0, description="the same, once for each time that they occur there")
    logit_bias: dict[TokenId, LogitShift] = Field({}, description="{token id: added to its logit}")
    banned_token_ids: tuple[TokenId, ...] = Field((), description="tokens that are never emitted")
    logprobs: int | None = Field(
        None, ge=0, description="with each token of generate its log-probability, nats, and this many alternatives"
    )
    max_new_tokens: int = Field(256, ge=0)
    min_new_tokens: int = Field(0, ge=0, description="no end token and no stop string before this many tokens")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="strings that end the text")
    stop_token_ids: tuple[TokenId, ...] = Field((), description="end tokens beside the model's own")
    add_special_tokens: bool = Field(
        True, description="prompts begin with what the tokenizer puts before a text, as in transformers"
    )
    parse_special: bool = Field(
        False, description="special tokens written in a prompt stand for themselves, not for their letters"
    )
    prompt: str = Field("def ", description="what generate continues")

    @model_validator(mode="after")
    def _min_below_max(self) -> "DecodingConfig":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens ({self.min_new_tokens}) is above max_new_tokens ({self.max_new_tokens})")
        return self


class SweepConfig(Section):
    k: Annotated[tuple[Annotated[int, Field(ge=0, le=60)], ...], Field(min_length=1)] | None = Field(
        None, description="K to measure; 0 to 8, or to the number of heads"
    )
    num_prompts: int | None = Field(
        None, ge=1, description="prompts to measure; 12 from the validation split, or all of the prompts file"
    )
    prompt_tokens: int = Field(32, ge=1, description="tokens of each prompt from the validation split")
    max_new_tokens: int = Field(64, ge=2, description="most tokens generated a run")
    ignore_eos: bool = Field(
        False, description="go on behind the end of a text, as serving benchmarks do; nobody's speed, and said so"
    )
    repeats: int = Field(3, ge=1, description="times that each K runs on each prompt")
    max_seconds: float = Field(
        30.0, ge=0, description="most seconds of further repeats that sweep-k takes to tell the best K from others"
    )


class RunConfig(Section):
    run_dir: str = Field("runs/tiny", min_length=1, description="where everything that a run makes lies")
    seed: int = Field(0, ge=0, lt=2**63, description="of the draws in decoding and the choice of prompts")
    runtime: RuntimeConfig = RuntimeConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    corpora: dict[str, CorpusConfig] = {}
    target: TargetConfig
    drafters: dict[str, DrafterConfig] = {}
    decoding: DecodingConfig = DecodingConfig()
    sweep: SweepConfig = SweepConfig()
    prompts: str | None = Field(None, description="a file of prompts: lines, JSONL, or Spec-Bench questions")
    chat: bool = Field(False, description="prompts are a user's messages, written in the target's chat template")

    @model_validator(mode="before")
    @classmethod
    def _expand_home(cls, tree: Any) -> Any:
        return _with_home(tree, ("run_dir",)) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _names_resolve(self) -> "RunConfig":
        problems = name_problems(self.model_dump())
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _with_home(tree: dict[Any, Any], names: tuple[str, ...] = ("path",)) -> dict[Any, Any]:
    """A copy in which ~ is the home folder in the fields `names`, and in `path` of every section below."""

    def expand(key: Any, value: Any) -> Any:
        if isinstance(value, dict):
            return _with_home(value)
        return os.path.expanduser(value) if key in names and isinstance(value, str) else value

    return {key: expand(key, value) for key, value in tree.items()}


_TAKEN_NAMES = {"none": "plain decoding", "baseline": "plain decoding", "target": "the target"}


def name_problems(tree: dict[str, Any]) -> list[str]:
    """What is wrong with the names in a run file, whole or, beside other errors, as it was written."""

    def section(parent: Any, name: str) -> dict[str, Any]:
        found = parent.get(name) if isinstance(parent, dict) else None
        return found if isinstance(found, dict) else {}

    problems: list[str] = []

    def check(path: str, name: Any, known: Sequence[str], what: str) -> None:
        if isinstance(name, str) and name not in known:
            problems.append(f"{path}: no {what} is named {name!r}{nearest(name, known)}")

    corpora, drafters = [str(name) for name in section(tree, "corpora")], section(tree, "drafters")
    drafter = section(tree, "decoding").get("drafter", DecodingConfig().drafter)
    for path in ("tokenizer.corpus", "target.corpus"):
        name = section(tree, path.partition(".")[0]).get("corpus")
        check(path, name, corpora, "corpus")
        if isinstance(name, str) and section(section(tree, "corpora"), name).get("generated_by"):
            problems.append(f"{path}: {name!r} is written by the target, which needs other text to be trained on")
    check("decoding.drafter", drafter, [*map(str, drafters), "none"], "drafter")
    problems += [f"corpora.{name}: {_NAME_RULE}" for name in corpora if not _is_name(name)]
    for name in map(str, drafters):
        check(f"drafters.{name}.corpus", section(drafters, name).get("corpus"), corpora, "corpus")
        if name in _TAKEN_NAMES:
            problems.append(f"drafters.{name}: the name is taken by {_TAKEN_NAMES[name]}; choose another")
        if not _is_name(name):
            problems.append(f"drafters.{name}: {_NAME_RULE}")
    if section(tree, "target").get("corpus") is None:
        problems.append("target.corpus: needed (prompts come from it, also where target.path is given)")
    if tree.get("chat") is True and not section(tree, "target").get("path"):
        problems.append("chat: a target that is trained here has no chat template; give target.path, or take chat out")
    return problems


_NAME_RULE = "a name may hold letters, digits, '_', '.' and '-', and not end in .previous, .training, .survey"


def _is_name(name: str) -> bool:
    """Whether a name can name a folder beside what a run keeps there."""
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name)) and not name.endswith(
        (".previous", ".training", ".survey")
    )


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint: the nearest known name, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known)}" if known else ""
