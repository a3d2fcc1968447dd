"""Generates from every prompt of a file, one JSON line each as it is finished; run again, it goes on.

Beside the lines lies a recipe of all that decides them, so that lines of two configs are never mixed.
The draws of a prompt depend on the seed and its place in the file alone: a file that was interrupted
and continued equals one made in one go, but for the times in it.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specctl.errors import Interrupted, SpecctlError, UsageError
from specctl.events import Round
from specctl.experiments.generate import Generation, generate
from specctl.experiments.pair import Pair
from specctl.experiments.trace import Trace
from specctl.experiments.workload import chat_template, encode
from specctl.models.files import open_files
from specctl.prompts import Prompt, fingerprint_prompts
from specctl.run_folder import differences, ensure_writable, read_object, to_text, write_json
from specctl.stats import Stats

_SUMMED = ("num_new_tokens", "num_rounds", "num_drafted", "num_accepted", "seconds", "prompt_seconds")

Progress = Callable[[int, int], None]  # prompts done, prompts in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Several prompts added together; category is None for all of them, or for those that have none."""

    category: str | None
    num_prompts: int
    num_new_tokens: int
    tokens_per_second: float | None
    end_to_end_tokens_per_second: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generations:
    """What all prompts gave. output: where the lines lie; where there is no such file, generations has them.

    num_found: lines that an earlier run had written.
    """

    output: str | None
    num_found: int
    generations: list[dict[str, Any]]
    drafter: str
    k: int
    temperature: float
    total: Totals
    by_category: list[Totals]
    lossy: bool = False


def check_output(path: Path) -> None:
    """Prove, before any other work, that lines can be written there. Raises UsageError where they cannot."""
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:  # results name it, and JSON is UTF-8
        shown = str(path).encode("utf-8", "backslashreplace").decode("ascii", "replace")
        raise UsageError(f"--output {shown}: its name is not UTF-8; choose another --output") from None
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder; name a file")
    if not path.exists():
        ensure_writable(path.parent, advice="choose another --output")
        return
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another --output") from error


def generate_file(
    pair: Pair,
    prompts: Sequence[Prompt],
    path: Path,
    progress: Progress | None = None,
    trace: Trace | None = None,
) -> Generations:
    """Append a line for every prompt that has none yet, in their order, and add all lines up.

    Raises UsageError, before anything is generated, for a prompt that is too long and for a file made
    otherwise; SpecctlError where the disk refuses; Interrupted on Ctrl+C. Finished lines stay.
    """
    encode(prompts, pair.artefacts, pair.target.context_length)  # refuses what does not fit
    lines = _resume(path, recipe(pair, prompts), {prompt.id for prompt in prompts})
    done = {line["id"] for line in lines}  # what an earlier run has written
    try:
        with open(path, "ab") as file:
            for index, prompt in enumerate(prompts):
                if progress:
                    progress(len(lines), len(prompts))
                if prompt.id not in done:
                    result = generate(pair, _nothing, _no_round, trace, text=prompt.text, request=index)
                    line = line_of(prompt, result, pair.config.seed)
                    file.write((to_text(line, indent=None) + "\n").encode("utf-8"))
                    file.flush()
                    lines.append(line)
            if progress:
                progress(len(lines), len(prompts))
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted: {len(lines)} of {len(prompts)} prompts are done in {path}; the same command goes on"
        ) from None
    except OSError as error:
        raise SpecctlError(
            f"cannot write {path}: {error.strerror or error}; what is done stays, and the same command goes on"
        ) from error
    return summarise(pair, lines, path, num_found=len(done))


def _nothing(prompt: Sequence[int]) -> None:
    pass


def _no_round(_: Round) -> None:
    pass


def line_of(prompt: Prompt, result: Generation, seed: int) -> dict[str, Any]:
    """What is kept of one prompt."""
    return {"id": prompt.id, "category": prompt.category, "prompt": prompt.text, **asdict(result), "seed": seed}


def summarise(pair: Pair, lines: list[dict[str, Any]], path: Path | None = None, num_found: int = 0) -> Generations:
    """Totals of all lines and, where there are categories, of each."""
    decoding = pair.config.decoding
    k = 0 if decoding.drafter == "none" else decoding.num_speculative_tokens
    categories = list(dict.fromkeys(line["category"] for line in lines))
    named = [] if categories == [None] else categories
    return Generations(
        output=str(path) if path else None,
        num_found=num_found,
        generations=[] if path else lines,
        drafter=decoding.drafter if k else "none",
        k=k,
        temperature=decoding.temperature,
        total=_totals(None, lines),
        by_category=[_totals(name, [line for line in lines if line["category"] == name]) for name in named],
        lossy=pair.is_lossy(k),
    )


def _totals(category: str | None, lines: Sequence[dict[str, Any]]) -> Totals:
    stats = Stats()
    for line in lines:
        for name in _SUMMED:
            setattr(stats, name, getattr(stats, name) + line["stats"][name])
    return Totals(
        category=category,
        num_prompts=len(lines),
        num_new_tokens=stats.num_new_tokens,
        tokens_per_second=stats.tokens_per_second,
        end_to_end_tokens_per_second=stats.end_to_end_tokens_per_second,
        acceptance_rate=stats.acceptance_rate,
        mean_acceptance_length=stats.mean_acceptance_length,
    )


# What decides the lines


def recipe(pair: Pair, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """All that decides what the lines say, by the names of the config where it has them."""
    config, name = pair.config, pair.config.decoding.drafter
    found: dict[str, Any] = {
        "seed": config.seed,
        "decoding": config.decoding.model_dump(mode="json", exclude={"prompt"}),
        "runtime": {"device": str(pair.device), "dtype": config.runtime.dtype},
        "prompts": {"count": len(prompts), "content": fingerprint_prompts(prompts)},
        "target": {"tokenizer": pair.artefacts.tokenizer.fingerprint(), "weights": _weights(pair, "target")},
    }
    if template := chat_template(pair.artefacts):
        found["chat"] = template.fingerprint
    if name != "none":
        drafter = pair.artefacts.drafter_config(name)
        if drafter.kind == "ngram":
            found["drafter"] = drafter.model_dump(mode="json")
        else:
            found["drafter"] = {"kind": drafter.kind, "weights": _weights(pair, name)}
    return found


def _weights(pair: Pair, name: str) -> str:
    """16 hex digits of a model's weights."""
    if name != "target":
        pair.prepare([name], pair.config.decoding.num_speculative_tokens)  # trains it, if the run lacks it
    digest = hashlib.sha256()
    for path in open_files(pair.artefacts.model_folder(name)).hashed_files():
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def recipe_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.recipe.json")


def _resume(path: Path, wanted: dict[str, Any], ids: Iterable[str]) -> list[dict[str, Any]]:
    """The finished lines of a file that was made from the same recipe; none for a new or empty one."""
    if not path.exists() or path.stat().st_size == 0:
        write_json(recipe_path(path), wanted)
        return []
    if not recipe_path(path).is_file():
        raise UsageError(f"{path} is not of this command's making (it has no {recipe_path(path).name}); choose another")
    changed = differences(read_object(recipe_path(path)), wanted)
    if changed:
        raise UsageError(f"{path} was made otherwise ({'; '.join(changed)}); choose another --output or remove it")
    whole, newline, _ = path.read_bytes().rpartition(b"\n")
    lines = _parse(path, whole, set(ids)) if newline else []
    with open(path, "r+b") as file:  # a last line without its end was being written when the process died
        file.truncate(len(whole) + len(newline))
    return lines


def _parse(path: Path, text: bytes, ids: set[str]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(text.split(b"\n"), 1):
        try:
            fields = json.loads(line)
            ids.remove(fields["id"])
            if not isinstance(fields["category"], str | None):
                raise TypeError
            if not all(math.isfinite(fields["stats"][name]) and fields["stats"][name] >= 0 for name in _SUMMED):
                raise ValueError
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise UsageError(f"{path}, line {number} was changed since it was written; repair or remove it") from None
        lines.append(fields)
    return lines
