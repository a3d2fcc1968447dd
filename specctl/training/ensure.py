"""Makes what a run needs and lacks: a target, its drafts, heads on it (and, through `text`, what they learn from).

Everything lies in the run folder beside the recipe that it was made from. An artefact whose recipe
is no longer the config's is stale: it is made again, saying what changed, and the old one is moved
to `NAME.previous` (models only). Nothing made from one config is ever used under another.

A training killed before its end leaves its state beside its folder: what is missing is made from the state of
the same recipe, if there is one, since the result is the same. One that was interrupted leaves the model as it
was too (the best checkpoint so far); that is used as it is until `resume` is asked for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl import run_folder
from specctl.config import (
    DrafterConfig,
    DraftModelConfig,
    MedusaConfig,
    NgramConfig,
    RunConfig,
    TargetConfig,
    TrainingConfig,
)
from specctl.errors import UsageError
from specctl.hardware import num_cores
from specctl.models.backend import Module, choose_backend, load_module
from specctl.models.checkpoint import open_checkpoint, weights_fingerprint
from specctl.models.files import open_files
from specctl.models.hf_folder import find_folder
from specctl.models.llama import Llama
from specctl.models.medusa import MedusaHeads
from specctl.models.medusa_checkpoint import load_heads
from specctl.models.vocabulary import Mapping
from specctl.progress import Progress, silent
from specctl.tokenizer import Tokenizer
from specctl.training.blocks import Blocks
from specctl.training.checkpoints import REPORT, interrupted_at, read_report, refuse_changes, train_into, unfinished
from specctl.training.jobs import Job, heads_job, model_job
from specctl.training.keeper import Keeper, Narrate
from specctl.training.loop import Estimate, estimate
from specctl.training.state import TrainingState, state_path
from specctl.training.text import RunText

Trainable = TargetConfig | DraftModelConfig | MedusaConfig


class Artefacts:
    """What a run has made, and makes on demand.

    narrate: called with each line of narration. may_train: False refuses to make anything. progress: shows how far
    long work is.
    """

    def __init__(
        self, config: RunConfig, *, narrate: Narrate, may_train: bool = True, progress: Progress = silent
    ) -> None:
        """Raises UsageError where the run folder cannot be written."""
        self.config, self.folder, self.narrate = config, Path(config.run_dir), narrate
        self._keeper, self._progress = Keeper(narrate, may_train), progress
        self.text = RunText(
            config,
            self._keeper,
            target=self.target,
            target_recipe=self._target_recipe,
            target_folder=lambda: self.model_folder("target"),
            progress=progress,
        )
        self._loaded: dict[str, Module] = {}
        self._tokenizers: dict[str, Tokenizer] = {}
        self._found: dict[str, Path] = {}
        self._told: set[str] = set()
        self._resumed: set[str] = set()
        self._trained: set[str] = set()
        run_folder.ensure_writable(self.folder)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    def narrate_once(self, line: str) -> None:
        """Tell a line, unless it was told before."""
        if line not in self._told:
            self._told.add(line)
            self.narrate(line)

    def drafter_config(self, name: str) -> DrafterConfig:
        """Raises UsageError for a name that the config does not have."""
        if name not in self.config.drafters:
            known = ", ".join(self.config.drafters) or "none"
            raise UsageError(f"no drafter is named {name!r} under drafters in the config; known are {known}")
        return self.config.drafters[name]

    def ensure(self, name: str) -> None:
        """Train "target" or a drafter if the run lacks it. Raises UsageError for a drafter that is not trained."""
        source = self._source(name)
        if not source.path:
            self._ensure_trained(name, source)

    def target(self) -> Module:
        """The target, trained first if the run lacks it."""
        return self._model("target")

    def draft(self, name: str) -> Module:
        """A draft model, trained first if the run lacks it; refused if its tokenizer does not fit the target's."""
        module = self._model(name)
        self.target()  # a draft is of no use without
        return module

    def take(self, name: str) -> Module:
        """A model to be laid out for decoding, in the run's dtype: "target" or a draft model, as `target` and `draft`.

        A native one is read for this alone, so that laying it out may use it up, and what was kept is dropped.
        """
        if isinstance(self._loaded.get(name), Llama):
            del self._loaded[name]
        if name in self._loaded:
            return self._loaded[name]
        module = self._read(name, for_decoding=True)
        return module if isinstance(module, Llama) else self._loaded.setdefault(name, module)

    def mapping(self, name: str) -> Mapping | None:
        """How a drafter with a tokenizer of its own reads and writes the target's tokens; None for the same one."""
        own = self._tokenizer_of(name)
        return None if own.fingerprint() == self.tokenizer.fingerprint() else Mapping.between(self.tokenizer, own)

    def _tokenizer_of(self, name: str) -> Tokenizer:
        """The tokenizer of a draft model's folder; else the run's."""
        source = self._source(name)
        if name == "target" or not isinstance(source, DraftModelConfig) or not source.path:
            return self.tokenizer
        if name not in self._tokenizers:
            self._tokenizers[name] = open_files(self.model_folder(name)).tokenizer()
        return self._tokenizers[name]

    def heads(self, name: str) -> MedusaHeads:
        """Medusa heads, trained first if the run lacks them; refused if they are of another target."""
        target = self.target()
        self.ensure(name)
        return load_heads(self.model_folder(name), target).eval()

    def report(self, name: str) -> dict[str, Any]:
        """What the training of "target" or a drafter reported. Raises UsageError for a `path:` model."""
        source = self._source(name)
        if source.path:
            raise UsageError(f"{name} comes from {source.path} and is not trained here; take its path out to train it")
        return read_report(self.model_folder(name))

    def model_folder(self, name: str) -> Path:
        source = self._source(name)
        if source.path:
            if name not in self._found:
                self._found[name] = find_folder(source.path)
            return self._found[name]
        return self.folder / "target" if name == "target" else self.folder / "drafters" / name

    def _source(self, name: str) -> Trainable:
        if name == "target":
            return self.config.target
        source = self.drafter_config(name)
        if isinstance(source, NgramConfig):
            raise UsageError(f"drafter {name} is of kind {source.kind} and has nothing to train")
        return source

    def _model(self, name: str) -> Module:
        if name not in self._loaded:
            self._loaded[name] = self._read(name)
        return self._loaded[name]

    def _read(self, name: str, *, for_decoding: bool = False) -> Module:
        """A model from its folder, made first if need be. for_decoding: a native one too in the run's dtype."""
        self.ensure(name)
        folder, runtime = self.model_folder(name), self.config.runtime
        if self._source(name).path:
            self._check_tokenizer(name, folder)
        backend, reason = choose_backend(folder, runtime.backend)
        if self._source(name).path:
            place = f"behind transformers ({reason})" if reason else "in the native decoder"
            self.narrate_once(f"{name} ({self._source(name).path}) runs {place}")
        dtype = getattr(torch, runtime.dtype)
        module = load_module(folder, backend, dtype, native_dtype=dtype if for_decoding else None)
        tokenizer, rows = self._tokenizer_of(name), module.shape.vocab_size
        if tokenizer.vocab_size > rows:
            if tokenizer.fingerprint() != self.tokenizer.fingerprint():  # its ids are looked up, every one of them
                raise UsageError(
                    f"{name} has {rows} vocabulary rows and its tokenizer {tokenizer.vocab_size} tokens; "
                    "they do not belong together"
                )
            self.narrate_once(
                f"{name} has {rows:,} vocabulary rows and its tokenizer {tokenizer.vocab_size:,} tokens: those from "
                f"{tokenizer.shown(rows)} on are not used"
            )
        return module

    def _check_tokenizer(self, name: str, folder: Path) -> None:
        if not folder.exists():
            raise UsageError(f"{name}: the checkpoint folder {folder} does not exist")
        other, source = self._tokenizer_of(name), self._source(name)
        if other.fingerprint() == self.tokenizer.fingerprint():
            return
        num_shared, difference = len(self.tokenizer.shared_with(other)), self.tokenizer.first_difference(other)
        differs = f"{name}: the tokenizer in {folder} differs from the target's ({difference})"
        if not num_shared:
            raise UsageError(f"{differs}, and they share no token; choose another draft")
        if isinstance(source, DraftModelConfig) and source.vocabulary == "intersection":
            return
        raise UsageError(
            f"{differs}; speculation needs one, or the {num_shared:,} tokens that both have: "
            f"drafters.{name}.vocabulary: intersection"
        )

    def _ensure_trained(self, name: str, source: Trainable) -> None:
        recipe, folder, resumed = self._recipe(name, source), self.model_folder(name), name in self._resumed
        if resumed:
            refuse_changes(folder, recipe, name)
        elif self._keeper.is_current(folder, recipe):
            if step := interrupted_at(folder):
                where = f"interrupted at step {step:,} of {source.training.steps:,}"
                self.narrate(f"{name} was {where} and is used as it is; {_resume_command(name, source)} goes on")
            return
        state = None if self._keeper.is_outdated(folder) else unfinished(folder, recipe)
        if resumed and state is None:
            if self._keeper.is_current(folder, recipe):
                if interrupted_at(folder):
                    raise UsageError(f"{name}: the state of its training, {state_path(folder)}, is gone; use --force")
                return
            self.narrate(f"{name} has no training to resume; it begins")
        self._train(name, source, state)

    def _train(self, name: str, source: Trainable, state: TrainingState | None) -> None:
        """Train a model, or go on from `state`, and put it in its place."""
        corpus, training, folder = source.corpus or self.text.target_corpus, source.training, self.model_folder(name)
        # Too little text is said before anything is trained.
        blocks = Blocks(self.text.token_ids(corpus, "train"), training.block_size, f"{corpus} train")
        job = self._job(name, source)
        self._refuse_rowless(blocks, name, corpus)
        done = state.step if state else 0
        with _training_threads(self.config):
            needs = _in_words(estimate(job.task, training, training.steps - done))
            size = f"{job.num_parameters:,} parameters, {training.steps:,} steps on {corpus}, about {needs}"
            self._keeper.announce(
                folder,
                f"training {name} ({size})"
                if state is None
                else f"going on with {name} at step {done:,} of {training.steps:,}, about {needs}",
            )
            facts = {
                "name": name,
                "num_parameters": job.num_parameters,
                "corpus": corpus,
                "threads": torch.get_num_threads(),
                "loss": training.loss,
                "path": str(folder),
            }
            train_into(
                folder,
                self._recipe(name, source),  # afresh: the teacher, made by now, is a part of it
                job.task,
                name,
                blocks,
                training,
                state=state,
                write=job.write,
                describe=lambda report: {**facts, **job.describe(report)},
                narrate=self.narrate,
                resume_command=_resume_command(name, source),
                progress=self._progress,
            )
        self._trained.add(name)

    def _refuse_rowless(self, blocks: Blocks, name: str, corpus: str) -> None:
        """Raise for text with a token that the target, and so what learns from it, has no row for."""
        rows = self._vocab_size(name)
        if rows < self.tokenizer.vocab_size and (largest := blocks.largest_id()) >= rows:
            raise UsageError(
                f"corpus {corpus} has the token {self.tokenizer.shown(largest)}, which the target has no row for "
                f"({rows:,} rows); take it out of the text"
            )

    def _held_out(self, corpus: str, training: TrainingConfig) -> Tensor:
        ids = self.text.token_ids(corpus, "validation")
        return Blocks(ids, training.block_size, f"{corpus} validation").spread(training.eval_blocks)

    def _job(self, name: str, source: Trainable) -> Job:
        training = source.training
        held_out = self._held_out(source.corpus or self.text.target_corpus, training)
        if isinstance(source, MedusaConfig):
            return heads_job(source, self.target(), held_out)
        others = source.corpus not in (None, self.text.target_corpus)
        return model_job(
            source,
            self.tokenizer,
            held_out,
            teacher=self.target() if training.loss != "ce" and name != "target" else None,
            shared=self._held_out(self.text.target_corpus, training) if others else held_out,
            vocab_size=self._vocab_size(name),
        )

    def _vocab_size(self, name: str) -> int:
        """Rows of a model that is trained: a draft's are those of the target, which may be padded."""
        if name == "target" or not self.config.target.path:
            return self.tokenizer.vocab_size
        return self.target().shape.vocab_size

    def _recipe(self, name: str, source: Trainable) -> dict[str, Any]:
        """All that decides what a trained model is."""
        corpus = source.corpus or self.text.target_corpus
        recipe: dict[str, Any] = {"training": source.training.model_dump(), **self.text.recipe(corpus)}
        if isinstance(source, MedusaConfig):
            recipe["heads"] = source.model_dump(include={"num_heads", "num_hidden_layers", "original_lm_head"})
        else:
            recipe["model"] = source.model.model_dump()
            if (vocab_size := self._vocab_size(name)) != self.tokenizer.vocab_size:
                recipe["vocab_size"] = vocab_size
        if name != "target" and (source.training.loss != "ce" or isinstance(source, MedusaConfig)):
            recipe["teacher"] = self._target_recipe()
        return recipe

    @cached_property
    def _target_fingerprint(self) -> str:
        """Of a `path:` target's weights; a native one's are sampled on disk."""
        folder = self.model_folder("target")
        native = choose_backend(folder, self.config.runtime.backend)[0] == "native"
        return weights_fingerprint(open_checkpoint(folder)[1] if native else self.target())

    def _target_recipe(self) -> dict[str, Any]:
        target = self.config.target
        if target.path:
            return {"path": target.path, "weights": self._target_fingerprint}
        step = interrupted_at(self.model_folder("target"))
        return {**self._recipe("target", target), **({"interrupted_at": step} if step else {})}

    def is_trained(self, name: str) -> bool:
        """Whether something that this run trains lies in its folder, current or not."""
        if name != "target" and isinstance(self.drafter_config(name), NgramConfig):
            return False
        return not self._source(name).path and (self.model_folder(name) / REPORT).is_file()

    def lacks_heads(self, name: str) -> bool:
        """Whether a drafter is Medusa heads that would have to be trained, for minutes, before it could draft."""
        source = self.drafter_config(name)
        if not isinstance(source, MedusaConfig) or source.path:
            return False
        return not self._keeper.is_current(self.model_folder(name), self._recipe(name, source))

    def was_trained(self, name: str) -> bool:
        """Whether this object trained it, rather than found it."""
        return name in self._trained

    def resume(self, name: str) -> None:
        """Make the next use of "target" or a drafter go on with its interrupted training, if it has one."""
        self._resumed.add(name)

    def train_again(self, name: str) -> None:
        """Make the next use of "target" or a drafter train it, current or not."""
        if not self._source(name).path:
            self._keeper.outdate(self.model_folder(name))


def _resume_command(name: str, source: Trainable) -> str:
    """How to go on; the config's path and overrides are the caller's to repeat."""
    if name == "target":
        return "specctl train-target --resume (with the same -c and --set)"
    command = "train-medusa" if isinstance(source, MedusaConfig) else "train-draft"
    return f"specctl {command} --drafter {name} --resume (with the same -c and --set)"


def _in_words(needs: Estimate) -> str:
    time = _duration(needs.seconds)
    return time if needs.num_bytes is None else f"{time} and {needs.num_bytes / 1e9:.1f} GB of memory"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"


@contextmanager
def _training_threads(config: RunConfig) -> Iterator[None]:
    """Training uses every core, unless runtime.threads says otherwise; decoding chooses for itself."""
    before, threads = torch.get_num_threads(), config.runtime.threads
    torch.set_num_threads(num_cores() if threads == "auto" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
