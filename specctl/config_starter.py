"""Writes a run file to start from: commented, on text of a person's own, sized to it and to a laptop.

The sizes are those of configs/tiny.yaml, with fewer steps and fewer vocabulary entries for less text. Knows
nothing about training; docs/training-study.md says how the sizes were found.
"""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from specctl.config import CorpusConfig
from specctl.config_file import SCHEMA_NAME, default_config_path, to_yaml
from specctl.corpus import split_pieces, survey
from specctl.errors import UsageError

LEAST_CHARACTERS = 20_000
LEAST_VALIDATION = 5_000  # characters: losses and a dozen prompts want at least so much
FRACTIONS = (0.05, 0.1, 0.2, 0.3)
LONGEST_BEGINNING = 40  # characters: where words are long, or there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Text to train on: where it lies (absolute paths), how much it is, how it is split, how it begins."""

    paths: tuple[str, ...]
    num_documents: int
    num_characters: int
    validation_fraction: float
    beginning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What suits a text of up to `num_characters`."""

    num_characters: float
    vocab_size: int
    target_steps: int
    draft_steps: int
    distilled_steps: int


_SIZES = (
    _Sizes(num_characters=100_000, vocab_size=512, target_steps=250, draft_steps=300, distilled_steps=250),
    _Sizes(num_characters=500_000, vocab_size=512, target_steps=500, draft_steps=600, distilled_steps=400),
    _Sizes(num_characters=3_000_000, vocab_size=1024, target_steps=700, draft_steps=1000, distilled_steps=600),
    _Sizes(num_characters=float("inf"), vocab_size=1024, target_steps=900, draft_steps=1000, distilled_steps=600),
)


def measure_text(paths: Sequence[str]) -> Text:
    """Read the text and choose the share of it that is kept for validation.

    Raises UsageError where a path is missing or not text, where all is too little to train on, and where a few
    documents of very unequal length cannot be split.
    """
    for fraction in FRACTIONS:
        config = CorpusConfig(paths=tuple(paths), validation_fraction=fraction)
        surveyed = survey(config)
        if surveyed.num_characters < LEAST_CHARACTERS:
            raise UsageError(
                f"{', '.join(paths)}: {surveyed.num_characters:,} characters of text are too little to train on; "
                f"give {LEAST_CHARACTERS:,} or more"
            )
        pieces = split_pieces(config, surveyed)
        num_validation = sum(len(piece.text) for piece in pieces if piece.split == "validation")
        if LEAST_VALIDATION <= num_validation <= surveyed.num_characters // 2:
            return Text(
                paths=tuple(map(_absolute, paths)),
                num_documents=surveyed.num_documents,
                num_characters=surveyed.num_characters,
                validation_fraction=fraction,
                beginning=_beginning(next(split_pieces(config, surveyed)).text),
            )
    raise UsageError(
        f"{', '.join(paths)}: no part of these {surveyed.num_documents} documents does for validation, their lengths "
        "are too unequal; join them into one file, which is split by position"
    )


def _absolute(given: str) -> str:
    """The path from the root; the working directory of a pattern is no part of the pattern."""
    path = Path(given).expanduser()
    if path.exists() or path.is_absolute():
        return str(path.absolute())
    return str(Path(glob.escape(str(Path.cwd()))) / path)


def _beginning(text: str) -> str:
    return " ".join(text[:1000].split()[:3])[:LONGEST_BEGINNING]


def starter(name: str, text: Text | None) -> str:
    """A run file whose run folder is runs/`name`; on the standard library's sources where no text is given."""
    num_characters = text.num_characters if text else float("inf")
    sizes = next(sizes for sizes in _SIZES if num_characters <= sizes.num_characters)
    configs = default_config_path().parent
    filled_in = Template((configs / "starter.template").read_text(encoding="utf-8")).substitute(
        schema=(configs / SCHEMA_NAME).resolve().as_uri(),
        run_dir=_in_line(f"runs/{name}"),
        source=f"paths: {_in_line(list(text.paths))}" if text else "builtin: python-stdlib",
        validation_fraction=text.validation_fraction if text else FRACTIONS[0],
        vocab_size=sizes.vocab_size,
        target_steps=sizes.target_steps,
        draft_steps=sizes.draft_steps,
        distilled_steps=sizes.distilled_steps,
        prompt=_in_line(text.beginning if text else "def "),
    )
    return "".join(f"{_aligned(line)}\n" for line in filled_in.splitlines())


def _in_line(value: str | list[str]) -> str:
    """A value as YAML in one line."""
    return to_yaml([value]).strip()[1:-1]


def _aligned(line: str) -> str:
    """The line with its comment in the column of its neighbours', whatever was filled in."""
    content, mark, comment = line.rpartition("  # ")
    return f"{content.rstrip():<28}{mark}{comment}" if content.strip() else line
