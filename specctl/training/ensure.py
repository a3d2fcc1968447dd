"""Makes what a run needs and lacks: token ids, a tokenizer, a target, its drafts.

Everything lies in the run folder beside the recipe that it was made from. An artefact whose recipe
is no longer the config's is stale: it is made again, saying what changed, and the old one is moved
to `NAME.previous` (models only). Nothing made from one config is ever used under another.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from specctl import run_folder
from specctl.config import DrafterConfig, ModelConfig, RunConfig, TargetConfig
from specctl.corpus import fingerprint_documents, load_token_ids, read_documents, split_documents, write_token_ids
from specctl.errors import Interrupted, UsageError
from specctl.hardware import num_cores
from specctl.models.checkpoint import load_checkpoint, save_checkpoint
from specctl.models.llama import Llama, LlamaShape
from specctl.tokenizer import Tokenizer
from specctl.training.loop import (
    Blocks,
    TokenIds,
    TrainingReport,
    estimate_seconds,
    train,
    validation_loss,
)

Narrate = Callable[[str], None]


class Artefacts:
    """What a run has made, and makes on demand.

    narrate: called with each line of narration. may_train: False refuses to make anything.
    """

    def __init__(self, config: RunConfig, *, narrate: Narrate, may_train: bool = True, progress: bool = False) -> None:
        """Raises UsageError where the run folder cannot be written."""
        self.config, self.folder = config, Path(config.run_dir)
        self._narrate, self._may_train, self._progress = narrate, may_train, progress
        self._documents: dict[str, tuple[list[str], str]] = {}
        self._loaded: dict[str, Llama] = {}
        self._outdated: set[Path] = set()
        self._trained: set[str] = set()
        run_folder.ensure_writable(self.folder)

    # Text

    def documents(self, corpus: str) -> tuple[list[str], str]:
        """A corpus's documents and their fingerprint."""
        if corpus not in self._documents:
            source = self.config.corpora[corpus]
            documents = read_documents(builtin=source.builtin, paths=source.paths)
            self._documents[corpus] = (documents, fingerprint_documents(documents))
        return self._documents[corpus]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer: the target folder's where target.path is given, else trained here."""
        if self.config.target.path:
            return Tokenizer.load(Path(self.config.target.path))
        corpus = self.config.tokenizer.corpus or self.target_corpus
        documents, text = self.documents(corpus)
        recipe = {"vocab_size": self.config.tokenizer.vocab_size, "text": text}
        folder = self.folder / "tokenizer"
        if not self._is_current(folder, recipe):
            self._announce(folder, f"training a tokenizer of {self.config.tokenizer.vocab_size} entries on {corpus}")
            train_documents, _ = split_documents(documents, self.config.corpora[corpus].validation_fraction)
            with run_folder.replacing(folder, recipe) as new:
                Tokenizer.train(train_documents, self.config.tokenizer.vocab_size).save(new)
        return Tokenizer.load(folder)

    def token_ids(self, corpus: str, split: str) -> TokenIds:
        """A corpus's token ids for "train" or "validation", memory-mapped."""
        documents, text = self.documents(corpus)
        fraction = self.config.corpora[corpus].validation_fraction
        recipe = {"text": text, "validation_fraction": fraction, "tokenizer": self.tokenizer.fingerprint()}
        folder = self.folder / "tokens" / corpus
        if not self._is_current(folder, recipe):
            self._announce(folder, f"tokenising {corpus} ({len(documents):,} documents)")
            train_documents, validation_documents = split_documents(documents, fraction)
            splits = {"train": train_documents, "validation": validation_documents}
            with run_folder.replacing(folder, recipe) as new:
                write_token_ids(new, corpus, splits, self.tokenizer, progress=self._progress)
        return load_token_ids(folder / f"{corpus}.{split}.npy")

    # Models

    @property
    def target_corpus(self) -> str:
        assert self.config.target.corpus is not None  # the config model refuses a run without
        return self.config.target.corpus

    def drafter_config(self, name: str) -> DrafterConfig:
        """Raises UsageError for a name that the config does not have."""
        if name not in self.config.drafters:
            known = ", ".join(self.config.drafters) or "none"
            raise UsageError(f"no drafter is named {name!r} under drafters in the config; known are {known}")
        return self.config.drafters[name]

    def target(self) -> Llama:
        """The target, trained first if the run lacks it."""
        return self._model("target", self.config.target)

    def draft(self, name: str) -> Llama:
        """A drafter's model, trained first if the run lacks it; refused if it does not fit the target."""
        if self.drafter_config(name).kind != "draft_model":
            raise UsageError(f"drafter {name} is of kind {self.drafter_config(name).kind} and has nothing to train")
        module = self._model(name, self.drafter_config(name))
        target = self.target()
        if module.shape.vocab_size != target.shape.vocab_size:
            raise UsageError(
                f"drafter {name} has {module.shape.vocab_size} vocabulary rows and the target "
                f"{target.shape.vocab_size}; a pair needs one vocabulary"
            )
        return module

    def report(self, name: str) -> dict[str, Any]:
        """What the training of "target" or a drafter reported. Raises UsageError for a `path:` model."""
        source = self._source(name)
        if source.path:
            raise UsageError(f"{name} comes from {source.path} and is not trained here; take its path out to train it")
        report: dict[str, Any] = run_folder.read_json(self.model_folder(name) / "training.json")
        return report

    def model_folder(self, name: str) -> Path:
        source = self._source(name)
        if source.path:
            return Path(source.path)
        return self.folder / "target" if name == "target" else self.folder / "drafters" / name

    def _source(self, name: str) -> TargetConfig | DrafterConfig:
        return self.config.target if name == "target" else self.drafter_config(name)

    def _model(self, name: str, source: TargetConfig | DrafterConfig) -> Llama:
        if name not in self._loaded:
            if source.path:
                self._check_tokenizer(name, Path(source.path))
            else:
                self._ensure_trained(name, source)
            module = load_checkpoint(self.model_folder(name)).eval()
            if self.tokenizer.vocab_size > module.shape.vocab_size:
                raise UsageError(
                    f"{name} has {module.shape.vocab_size} vocabulary rows and its tokenizer "
                    f"{self.tokenizer.vocab_size} tokens; they do not belong together"
                )
            self._loaded[name] = module
        return self._loaded[name]

    def _check_tokenizer(self, name: str, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(f"{name}: the checkpoint folder {folder} does not exist")
        other = Tokenizer.load(folder)
        if other.fingerprint() != self.tokenizer.fingerprint():
            difference = self.tokenizer.first_difference(other)
            raise UsageError(
                f"{name}: the tokenizer in {folder} differs from the target's ({difference}); speculation needs one"
            )

    def _ensure_trained(self, name: str, source: TargetConfig | DrafterConfig) -> None:
        corpus = source.corpus or self.target_corpus
        recipe = self._recipe(name, source)
        folder = self.model_folder(name)
        if self._is_current(folder, recipe):
            steps, planned = self.report(name)["steps"], source.training.steps
            if steps < planned:
                self._narrate(f"{name} was interrupted at step {steps} of {planned} and is used as it is")
            return
        train_ids, held_out_ids = self.token_ids(corpus, "train"), self.token_ids(corpus, "validation")
        # Too little text is said before anything is trained.
        Blocks(train_ids, source.training.block_size, f"{corpus} train")
        Blocks(held_out_ids, source.training.block_size, f"{corpus} validation")
        teacher = self.target() if source.training.loss == "kl" and name != "target" else None
        module = Llama(_shape(source.model, self.tokenizer.vocab_size))
        module.initialise(source.training.seed)
        with _training_threads(self.config):
            seconds = estimate_seconds(module, source.training, teacher)
            self._announce(
                folder,
                f"training {name} ({module.num_parameters:,} parameters, {source.training.steps:,} steps on {corpus}, "
                f"about {_duration(seconds)})",
            )
            report = train(
                module, name, train_ids, held_out_ids, source.training, teacher=teacher, progress=self._progress
            )
            details = self._describe(name, source, module, report)
        with run_folder.replacing(folder, recipe, keep_previous=True) as new:
            save_checkpoint(module, new, self.tokenizer.end_of_text)
            self.tokenizer.save(new)
            run_folder.write_json(new / "training.json", details)
        self._trained.add(name)
        if report.interrupted:
            raise Interrupted(
                f"{name}: interrupted at step {report.steps} of {source.training.steps}; the model as it was is in "
                f"{folder} and will be used; train again with --force"
            )

    def _recipe(self, name: str, source: TargetConfig | DrafterConfig) -> dict[str, Any]:
        """All that decides what a trained model is."""
        corpus = source.corpus or self.target_corpus
        recipe: dict[str, Any] = {
            "model": source.model.model_dump(),
            "training": source.training.model_dump(),
            "text": self.documents(corpus)[1],
            "validation_fraction": self.config.corpora[corpus].validation_fraction,
            "tokenizer": self.tokenizer.fingerprint(),
        }
        if source.training.loss == "kl" and name != "target":
            target = self.config.target
            recipe["teacher"] = {"path": target.path} if target.path else self._recipe("target", target)
        return recipe

    def _describe(
        self, name: str, source: TargetConfig | DrafterConfig, module: Llama, report: TrainingReport
    ) -> dict[str, Any]:
        """The report as stored: validation_loss is on the target's corpus, own_validation_loss on its own."""
        corpus, training = source.corpus or self.target_corpus, source.training
        shared = report.validation_loss
        if corpus != self.target_corpus:
            ids = self.token_ids(self.target_corpus, "validation")
            blocks = Blocks(ids, training.block_size, f"{self.target_corpus} validation").spread(training.eval_blocks)
            shared = validation_loss(module, blocks, training.batch_size)
        return {
            "name": name,
            "num_parameters": module.num_parameters,
            "corpus": corpus,
            "threads": torch.get_num_threads(),
            **asdict(report),
            "validation_loss": shared,
            "own_validation_loss": report.validation_loss,
            "path": str(self.model_folder(name)),
        }

    # Recipes

    def _is_current(self, folder: Path, recipe: dict[str, Any]) -> bool:
        found = run_folder.read_recipe(folder)
        if found is None or folder in self._outdated:
            return False
        differences = run_folder.differences(found, recipe)
        if differences:
            self._narrate(f"{folder} was made from another config ({'; '.join(differences)})")
        return not differences

    def _announce(self, folder: Path, what: str) -> None:
        if not self._may_train:
            raise UsageError(f"{folder} is missing or stale, and --no-train forbids {what}; run without --no-train")
        self._narrate(what)

    def is_trained(self, name: str) -> bool:
        """Whether a model that this run trains lies in its folder, current or not."""
        return not self._source(name).path and (self.model_folder(name) / "training.json").is_file()

    def was_trained(self, name: str) -> bool:
        """Whether this object trained it, rather than found it."""
        return name in self._trained

    def train_again(self, name: str) -> None:
        """Make the next use of "target" or a drafter train it, current or not."""
        if not self._source(name).path:
            self._outdated.add(self.model_folder(name))


def _shape(model: ModelConfig, vocab_size: int) -> LlamaShape:
    return LlamaShape(vocab_size=vocab_size, **model.model_dump())


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
