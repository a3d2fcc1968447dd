"""Generates from every prompt of a file, one JSON line each as it is finished; run again, it goes on.

The draws of a prompt depend on the seed and its place in the file alone: a file that was interrupted
and continued equals one made in one go, but for the times in it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specctl.errors import Interrupted, SpecctlError
from specctl.events import Round
from specctl.experiments.generate import Generation, generate
from specctl.experiments.output_file import SUMMED, Output
from specctl.experiments.pair import Pair
from specctl.experiments.trace import Trace
from specctl.experiments.workload import chat_template, encode
from specctl.models.files import open_files
from specctl.prompts import Prompt, fingerprint_prompts
from specctl.stats import Stats

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


def generate_file(
    pair: Pair,
    prompts: Sequence[Prompt],
    output: Output,
    progress: Progress | None = None,
    trace: Trace | None = None,
) -> Generations:
    """Append a line for every prompt that has none yet, in their order, and add all lines up.

    Raises UsageError, before anything is generated, for a prompt that is too long and for a file made
    otherwise; SpecctlError where the disk refuses; Interrupted on Ctrl+C. Finished lines stay.
    """
    path, again = output.path, "" if output.is_stream else "the same command goes on"
    encode(prompts, pair.artefacts, pair.target.context_length)  # refuses what does not fit
    lines = output.resume(recipe(pair, prompts), {prompt.id for prompt in prompts})
    done = {line["id"] for line in lines}  # what an earlier run has written
    try:
        for index, prompt in enumerate(prompts):
            if progress:
                progress(len(lines), len(prompts))
            if prompt.id not in done:
                result = generate(pair, _nothing, _no_round, trace, text=prompt.text, request=index)
                lines.append(line_of(prompt, result, pair.config.seed))
                output.write(lines[-1])
        if progress:
            progress(len(lines), len(prompts))
    except KeyboardInterrupt:
        so_far = f"interrupted: {len(lines)} of {len(prompts)} prompts are done in {path}"
        raise Interrupted(f"{so_far}; {again}" if again else so_far) from None
    except BrokenPipeError:  # whoever read the lines wants no more
        raise
    except OSError as error:
        stays = f"; what is done stays, and {again}" if again else ""
        raise SpecctlError(f"cannot write {path}: {error.strerror or error}{stays}") from error
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
        for name in SUMMED:
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
