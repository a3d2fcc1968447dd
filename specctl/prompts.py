"""Reads files of prompts: lines of text, JSONL, or Spec-Bench's question files.

Text (any name but .jsonl): one prompt a line, blank lines skipped. JSONL: an object a line with
`prompt` or `text`, or `turns` as Spec-Bench has it (the first turn is the prompt: later turns answer
what a chat model said before, and are not used), and optionally `id` or
`question_id`, and `category`. Where no id is given it is the line's number, or `line-` before it where another
prompt was given that id. Knows nothing of tokens.
"""

import json
import random
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specctl.errors import UsageError
from specctl.run_folder import fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One text to continue. id: unique in its file; category: what kind of task it is, if known."""

    id: str
    category: str | None
    text: str


_Fields = tuple[str | None, str | None, str]  # id and category, where they are given, and text


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt of a file, in its order.

    Raises UsageError, naming file and line, where it is missing, broken, empty or repeats an id.
    """
    as_json = path.suffix.lower() in (".jsonl", ".ndjson")
    if path.suffix.lower() == ".json":
        raise UsageError(f"prompts {path}: a file of prompts has one object a line; write it so and name it .jsonl")
    found: dict[int, _Fields] = {}  # by the line's number
    given: dict[str, int] = {}
    for number, line in enumerate(_read_lines(path), 1):
        if not line.strip():
            continue
        where = f"prompts {path}, line {number}"
        found[number] = fields = _from_json(line, where) if as_json else (None, None, line)
        name = fields[0]
        if name in given:
            raise UsageError(f"{where}: the id {name!r} was given in line {given[name]} too; ids differ")
        if name is not None:
            given[name] = number
    if not found:
        raise UsageError(f"prompts {path}: there is no prompt in it; write one a line")
    return [
        Prompt(id=_made_id(number, given) if name is None else name, category=category, text=text)
        for number, (name, category, text) in found.items()
    ]


def _made_id(number: int, given: Collection[str]) -> str:
    """An id for the prompt of a line, unlike all given ones and those of other lines."""
    made = str(number)
    while made in given:
        made = f"line-{made}"
    return made


_piped: dict[tuple[int, int], bytes] = {}  # what pipes gave, which give it once, by device and inode


def _read_bytes(path: Path) -> bytes:
    found = path.stat()
    if stat.S_ISREG(found.st_mode):
        return path.read_bytes()
    key = (found.st_dev, found.st_ino)
    if key not in _piped:
        _piped[key] = path.read_bytes()
    return _piped[key]


def _read_lines(path: Path) -> list[str]:
    try:
        text = _read_bytes(path).decode("utf-8")
    except FileNotFoundError:
        raise UsageError(f"prompts {path} does not exist; name a file with one prompt a line") from None
    except OSError as error:
        raise UsageError(f"prompts {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"prompts {path} is not UTF-8 at byte {error.start}; convert it to UTF-8") from None
    # Not splitlines: form feeds and U+2028 belong to a prompt.
    return [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n")]


def _from_json(line: str, where: str) -> _Fields:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON ({error}); write one object a line") from None
    if not isinstance(fields, dict):
        raise UsageError(f'{where}: not an object; write {{"prompt": "..."}}')
    text = _text(fields, where)
    name, category = fields.get("id", fields.get("question_id")), fields.get("category")
    for field, value in (("id", name), ("category", category)):
        if isinstance(value, bool) or not (value is None or isinstance(value, (str, int))):
            raise UsageError(f"{where}: its {field} is neither text nor a number")
    for field, value in (("text", text), ("id", name), ("category", category)):
        try:
            str(value).encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError(f"{where}: its {field} holds half a surrogate pair and is not valid Unicode") from None
    return None if name is None else str(name), None if category is None else str(category), text


def _text(fields: dict[str, Any], where: str) -> str:
    field = next((name for name in ("prompt", "text", "turns") if name in fields), None)
    if field is None:
        raise UsageError(f"{where}: it has no prompt, text or turns; give one of them")
    text = fields[field]
    if field == "turns":
        text = text[0] if isinstance(text, list) and text else None
    if not isinstance(text, str):
        raise UsageError(f"{where}: its {field} is not {'a list of texts' if field == 'turns' else 'text'}")
    if not text:
        raise UsageError(f"{where}: its {field} is empty; a prompt has at least one character")
    return text


def fingerprint_prompts(prompts: Sequence[Prompt]) -> str:
    """16 hex digits of ids, categories and texts, in order."""
    return fingerprint([[prompt.id, prompt.category, prompt.text] for prompt in prompts])


Item = TypeVar("Item")


def hold_out(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """(the rest, about a fifth spread evenly over the sequence).

    At least one is held out of two or more, and of 18 or more at least 6, from which an interval can be made.
    """
    count = 0 if len(items) < 2 else max(1, round(len(items) / 5), 6 if len(items) >= 18 else 0)
    held = {int((index + 0.5) * len(items) / count) for index in range(count)}
    return (
        [item for index, item in enumerate(items) if index not in held],
        [item for index, item in enumerate(items) if index in held],
    )


def choose(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` prompts in their order, decided by the seed, from each category in turn; all where there are fewer."""
    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    queues: dict[str | None, list[Prompt]] = {prompt.category: [] for prompt in prompts}
    for prompt in shuffled:
        queues[prompt.category].append(prompt)
    rounds = max(map(len, queues.values()), default=0)
    in_turn = [queue[index] for index in range(rounds) for queue in queues.values() if index < len(queue)]
    chosen = {prompt.id for prompt in in_turn[:count]}
    return [prompt for prompt in prompts if prompt.id in chosen]
