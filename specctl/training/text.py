"""A run's text: the survey of each corpus, the tokenizer, and token ids, made once and kept in the run folder.

A corpus is text from somewhere, or what the target itself writes; either way its token ids lie in
`tokens/NAME/`, beside the recipe that they were made by. What the target has written of an unfinished
corpus lies in `tokens/.NAME.parts/`, likewise, and is gone on with. Knows nothing about how models are trained.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from specctl import run_folder
from specctl.config import CorpusConfig, RunConfig
from specctl.corpus import (
    Survey,
    load_token_ids,
    read_survey,
    split_pieces,
    state_of_files,
    survey,
    training_sample,
    write_token_ids,
)
from specctl.errors import Interrupted, UsageError
from specctl.models.backend import Module, writer
from specctl.models.checkpoint import end_tokens
from specctl.models.files import open_files
from specctl.models.vocabulary import trimmed
from specctl.progress import Progress
from specctl.prompts import Prompt, fingerprint_prompts, read_prompts
from specctl.tokenizer import Tokenizer
from specctl.training.blocks import TokenIds
from specctl.training.generated_text import Prompts, in_turn, num_done, stretches, write_generated_ids
from specctl.training.keeper import Keeper


class RunText:
    """target, target_recipe: the model that writes a generated corpus, and all that decides what it is.

    target_folder: where it lies.
    """

    def __init__(
        self,
        config: RunConfig,
        keeper: Keeper,
        *,
        target: Callable[[], Module],
        target_recipe: Callable[[], dict[str, Any]],
        target_folder: Callable[[], Path],
        progress: Progress,
    ) -> None:
        self._config, self._folder, self._keeper = config, Path(config.run_dir), keeper
        self._target, self._target_recipe, self._progress = target, target_recipe, progress
        self._target_folder = target_folder
        self._surveys: dict[str, Survey] = {}

    @property
    def target_corpus(self) -> str:
        assert self._config.target.corpus is not None  # the config model refuses a run without
        return self._config.target.corpus

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer: the target folder's where target.path is given, else trained here."""
        if self._config.target.path:
            return open_files(self._target_folder()).tokenizer()
        corpus, vocab_size = self._config.tokenizer.corpus or self.target_corpus, self._config.tokenizer.vocab_size
        source, surveyed = self._config.corpora[corpus], self._survey(corpus)
        recipe = {
            "vocab_size": vocab_size,
            "text": surveyed.fingerprint,
            "validation_fraction": source.validation_fraction,
        }
        folder = self._folder / "tokenizer"
        if not self._keeper.is_current(folder, recipe):
            self._keeper.announce(folder, f"training a tokenizer of {vocab_size} entries on {corpus}")
            with run_folder.replacing(folder, recipe) as new:
                sample = training_sample(source, surveyed, corpus, progress=self._progress)
                Tokenizer.train(sample, vocab_size).save(new)
        return Tokenizer.load(folder)

    def recipe(self, corpus: str) -> dict[str, Any]:
        """All that decides the token ids of a corpus."""
        source = self._config.corpora[corpus]
        recipe: dict[str, Any] = {
            "validation_fraction": source.validation_fraction,
            "tokenizer": self.tokenizer.fingerprint(),
        }
        if source.prompts is not None:
            prompts = {
                "file": fingerprint_prompts(self._prompts(source)),
                **({"begin_with": begin} if (begin := self.tokenizer.added_before) else {}),
                "seed": self._config.target.training.seed,
            }
            return {**recipe, "num_tokens": source.num_tokens, "prompts": prompts, "writer": self._target_recipe()}
        if source.generated_by:
            prompts = {
                "text": self._survey(self.target_corpus).fingerprint,
                "validation_fraction": self._config.corpora[self.target_corpus].validation_fraction,
                "seed": self._config.target.training.seed,
            }
            return {**recipe, "num_tokens": source.num_tokens, "prompts": prompts, "writer": self._target_recipe()}
        return {**recipe, "text": self._survey(corpus).fingerprint}

    def token_ids(self, corpus: str, split: str) -> TokenIds:
        """A corpus's token ids for "train" or "validation", memory-mapped."""
        source, folder = self._config.corpora[corpus], self._folder / "tokens" / corpus
        if source.generated_by:
            self._target()  # made by now, it is a part of the recipe
        recipe = self.recipe(corpus)
        if not self._keeper.is_current(folder, recipe):
            if source.generated_by:
                self._generate(corpus, source, folder, recipe)
            else:
                self._tokenise(corpus, source, folder, recipe)
        return load_token_ids(folder / f"{corpus}.{split}.npy")

    def _tokenise(self, corpus: str, source: CorpusConfig, folder: Path, recipe: dict[str, Any]) -> None:
        surveyed = self._survey(corpus)
        self._keeper.announce(folder, f"tokenising {corpus} ({surveyed.num_documents:,} documents)")
        pieces, total = split_pieces(source, surveyed), surveyed.num_characters
        with run_folder.replacing(folder, recipe) as new:
            write_token_ids(new, corpus, pieces, self.tokenizer, num_characters=total, progress=self._progress)

    def _generate(self, corpus: str, source: CorpusConfig, folder: Path, recipe: dict[str, Any]) -> None:
        model = trimmed(writer(self._target()), self.tokenizer.vocab_size)
        prompts = self._prompts_for(corpus, source, model.context_length)
        parts = folder.with_name(f".{folder.name}.parts")
        found = run_folder.read_recipe(parts)
        done = num_done(parts) if found is not None and not run_folder.differences(found, recipe) else 0
        so_far = f", {done:,} of them are written" if done else ""
        self._keeper.announce(folder, f"generating {corpus} with the target ({source.num_tokens:,} tokens{so_far})")
        with run_folder.replacing(folder, recipe) as new:
            if not done:
                shutil.rmtree(parts, ignore_errors=True)
                run_folder.write_json(parts / run_folder.RECIPE, recipe)
            try:
                write_generated_ids(
                    new,
                    corpus,
                    model,
                    prompts,
                    parts=parts,
                    num_tokens=source.num_tokens,
                    validation_fraction=source.validation_fraction,
                    end_of_text=self.tokenizer.end_of_text,
                    seed=self._config.target.training.seed,
                    progress=self._progress,
                )
            except KeyboardInterrupt:
                raise Interrupted(
                    f"{corpus}: interrupted; {num_done(parts):,} of {source.num_tokens:,} tokens are kept, and the "
                    "same command goes on from there"
                ) from None
        shutil.rmtree(parts, ignore_errors=True)

    def _prompts(self, source: CorpusConfig) -> list[Prompt]:
        assert source.prompts is not None
        return read_prompts(Path(source.prompts).expanduser())

    def _prompts_for(self, corpus: str, source: CorpusConfig, context_length: int) -> Prompts:
        """What a corpus that the target writes begins with."""
        if source.prompts is not None:
            encoded = [self.tokenizer.encode_prompt(prompt.text) for prompt in self._prompts(source)]
            ends = {*end_tokens(self._target_folder()), self.tokenizer.end_of_text}
            return in_turn(encoded, context_length, frozenset(end for end in ends if end is not None))
        corpus_ids = self.token_ids(self.target_corpus, "train")
        if not len(corpus_ids):
            raise UsageError(f"the train split of {self.target_corpus} has no tokens to begin {corpus} with")
        return stretches(corpus_ids, context_length)

    def _survey(self, corpus: str) -> Survey:
        """What reading a corpus told; read again only when the name, size or time of one of its files changed."""
        if corpus not in self._surveys:
            source, path = self._config.corpora[corpus], self._folder / "tokens" / f"{corpus}.survey.json"
            files = state_of_files(source)
            known = run_folder.read_object(path) if files and path.is_file() else {}
            if files and known.get("files") == files:
                self._surveys[corpus] = read_survey(known.get("survey"), path)
            else:
                self._surveys[corpus] = survey(source)
                if files and self._keeper.may_make:
                    run_folder.write_json(path, {"files": files, "survey": asdict(self._surveys[corpus])})
        return self._surveys[corpus]
