"""Fields of a JSON object that others wrote, read by kind; one line names the field that is missing or wrong.

A field that is absent, or null where it may be, takes its default. Knows nothing about what fields mean.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specctl.errors import UsageError

REQUIRED: Any = object()


class Fields:
    """path: the file that messages name. prefix: where in the file the object stands, such as "rope_scaling."."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.values, self._path, self.prefix = values, path, prefix

    def whole(self, name: str, default: Any = REQUIRED, *, least: int = 1, most: int = 2**24) -> Any:
        def valid(value: Any) -> bool:
            return type(value) is int and least <= value <= most

        return self._read(name, default, valid, f"a whole number from {least:,} to {most:,}")

    def optional(self, name: str, absent: int | None) -> int | None:
        """A whole number, None where it is null, `absent` where it is not there."""
        value: int | None = self.whole(name, None if name in self.values else absent)
        return value

    def number(self, name: str, least: float, most: float, default: Any = REQUIRED) -> float:
        def valid(value: Any) -> bool:
            return type(value) in (int, float) and least <= value <= most

        return float(self._read(name, default, valid, f"a number from {least:g} to {most:g}"))

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._read(name, default, lambda value: type(value) is bool, "true or false"))

    def part(self, name: str) -> "Fields":
        """The fields of an object in this one, of none where it is null or absent."""
        value = self._read(name, {}, lambda value: isinstance(value, dict), "an object or null")
        return Fields(value, self._path, f"{self.prefix}{name}.")

    def refuse(self, what: str) -> UsageError:
        """The error to raise where fields contradict each other: the file, then what."""
        return UsageError(f"{self._path} {what}")

    def _read(self, name: str, default: Any, valid: Callable[[Any], bool], kind: str) -> Any:
        value = self.values.get(name)
        if value is None and default is not REQUIRED:
            return default
        if name not in self.values:
            raise self.refuse(f"lacks {self.prefix}{name}")
        if not valid(value):
            raise self.refuse(f"has {self.prefix}{name} {json.dumps(value)[:40]}; it must be {kind}")
        return value
