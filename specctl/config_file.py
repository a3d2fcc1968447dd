"""Reads and writes a run file: YAML, overrides, and every mistake at once with its path and the nearest key.

Knows the sections of `config.py` by their fields alone.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from specctl.config import DRAFTER_KINDS, CorpusConfig, RunConfig, Section, name_problems, nearest
from specctl.errors import UsageError

SCHEMA_NAME = "specctl.schema.json"  # beside the shipped configs


def default_config_path() -> Path:
    """The tiny config, from the installed package or the repository."""
    package = Path(__file__).parent
    installed = package / "configs" / "tiny.yaml"
    return installed if installed.is_file() else package.parent / "configs" / "tiny.yaml"


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    flags: Mapping[str, str] | None = None,
) -> RunConfig:
    """Read a run file, apply `section.field=value` overrides (YAML values, of --set), then plain `values` by path.

    flags: by path too, where a value was typed, such as --k.
    Raises UsageError that lists every problem, one a line, each with what brought it: the file, --set or a flag.
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
    changes = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {override}: write it as section.field=value")
        changes.append(_Change(f"--set {key}", key, _parse(value, f"--set {key}")))
    changes += [_Change((flags or {}).get(key, key), key, value) for key, value in (values or {}).items()]
    trees = list(accumulate(changes, lambda before, change: change.made_in(before), initial=tree))
    try:
        return RunConfig.model_validate(trees[-1])
    except ValidationError:
        raise UsageError(_blame(path, trees, changes)) from None


@dataclass(frozen=True, slots=True)
class _Change:
    """A field that the command line sets. typed: what sets it there, `--k` or `--set section.field`."""

    typed: str
    key: str
    value: Any

    def made_in(self, tree: dict[str, Any]) -> dict[str, Any]:
        return _with(tree, self.key, self.value)

    def blamed_for(self, problem: str) -> str:
        """A problem that it brought, with what was typed in the place of the field, or else before it."""
        at_home = problem.startswith((f"{self.key}:", f"{self.key}."))
        return self.typed + (problem.removeprefix(self.key) if at_home else f": {problem}")


def _with(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with one field set; YAML anchors make several sections one object, and only this one is meant."""
    name, _, rest = key.partition(".")
    if rest:
        section = tree.get(name)
        value = _with(section if isinstance(section, dict) else {}, rest, value)
    return {**tree, name: value}


def _blame(path: Path, trees: Sequence[dict[str, Any]], changes: Sequence[_Change]) -> str:
    """Every problem of the last tree. trees: the run file's, then one after each change."""
    told = [_problems(tree) for tree in trees]
    own, brought = list[str](), list[str]()
    for line in told[-1]:
        since = max((at for at, lines in enumerate(told) if line not in lines), default=-1) + 1
        if since == 0:
            own.append(f"  - {line}")
        else:
            brought.append(changes[since - 1].blamed_for(line))
    return "\n".join([*([f"config {path}:"] if own else []), *own, *brought])


def _problems(tree: dict[str, Any]) -> list[str]:
    """What is wrong with a run file, a line each."""
    try:
        RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = [line for detail in error.errors() for line in _describe(dict(detail))]
        if not any(detail["loc"] == () for detail in error.errors()):  # pydantic looks at names only where the rest is
            lines += name_problems(tree)
        return lines
    return []


def to_yaml(value: Any) -> str:
    """A JSON value as YAML that loads as the same value: keys in order, lists on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)


def json_schema() -> dict[str, Any]:
    """The JSON schema of run files, for editors; what only `RunConfig` can check, such as names, is not in it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RunConfig.model_json_schema(),
        "title": "A run file of specctl",
    }


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number and a duplicate key is an error."""


class _Dumper(yaml.SafeDumper):
    """Quotes a text that `_Loader` would take for a number."""


for _part in (_Loader, _Dumper):
    _part.yaml_implicit_resolvers = {key: list(found) for key, found in _part.yaml_implicit_resolvers.items()}
    _part.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
_Dumper.add_representer(list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, True))


def _construct_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue  # << is no key: what it brings yields to what is written beside it
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
    except (yaml.YAMLError, ValueError, TypeError, KeyError, RecursionError) as error:  # scalars raise as they please
        raise UsageError(f"{where}: not YAML ({error})") from None


def _describe(detail: dict[str, Any]) -> list[str]:
    location = [str(part) for part in detail["loc"]]
    kind = location.pop(2) if location[:1] == ["drafters"] and location[2:3] and location[2] in DRAFTER_KINDS else None
    path = ".".join(location)
    if detail["type"] == "extra_forbidden":
        if kind and len(location) == 3 and any(location[2] in other.model_fields for other in DRAFTER_KINDS.values()):
            return [f"{path}: a drafter of kind {kind} has no {location[2]}"]
        return [f"{path}: unknown key{_nearest_key(location, kind)}"]
    if detail["type"] == "union_tag_invalid":
        wrong = detail["ctx"]["tag"]
        return [f"{path}.kind: no kind of drafter is named {wrong!r}{nearest(wrong, list(DRAFTER_KINDS))}"]
    if detail["type"] == "missing":
        return [f"{path}: needed, and not given"]
    if detail["type"] == "value_error":
        text = str(detail["ctx"]["error"])
        return [f"{path}: {text}"] if path else text.splitlines()
    # A field of several types reports once for each; its own name is enough.
    parts = [part for part in location if part not in ("int", "constrained-int") and not part.startswith("literal")]
    text = detail["msg"]
    limit = next((value for name, value in detail.get("ctx", {}).items() if name in ("ge", "gt", "le", "lt")), None)
    if isinstance(limit, float):  # 1e+15 rather than its zeros
        text = f"{text.rpartition(' ')[0]} {limit:g}"
    return [f"{'.'.join(parts)}: {text[0].lower()}{text[1:]}, not {detail['input']!r}"]


def _fields_at(location: Sequence[str], kind: str | None) -> list[str]:
    """The field names of the section that a YAML path leads to; kind: that of the drafter on the way."""
    section: type[Section] = RunConfig
    for name in location:
        if section is RunConfig and name in ("corpora", "drafters"):
            section = CorpusConfig if name == "corpora" else DRAFTER_KINDS[kind or "draft_model"]
            continue
        annotation = section.model_fields[name].annotation if name in section.model_fields else None
        if isinstance(annotation, type) and issubclass(annotation, Section):
            section = annotation
    return list(section.model_fields)


def _nearest_key(location: Sequence[str], kind: str | None) -> str:
    """A hint for an unknown key: where a field of that name is at home, or else the nearest name in its section."""
    *section, name = location
    known = _fields_at(section, kind)
    paths = list(_field_paths(RunConfig, ()))
    if difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return nearest(name, known)
    wanted = [name]
    if all(path[-1] != name for path in paths) and not difflib.get_close_matches(name, known, n=1, cutoff=0.5):
        wanted = difflib.get_close_matches(name, [path[-1] for path in paths], n=1, cutoff=0.8)
    homes = [path for path in paths if path[-1] in wanted]
    if not homes:
        return nearest(name, known)
    home = max(homes, key=lambda path: _num_shared(path, section))
    return f"; did you mean {'.'.join(_filled_in(home, section))!r}?"


def _field_paths(section: type[Section], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every field's path; NAME stands for the names of corpora and drafters."""
    for name, field in section.model_fields.items():
        if section is RunConfig and name in ("corpora", "drafters"):
            for named in [CorpusConfig] if name == "corpora" else DRAFTER_KINDS.values():
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
