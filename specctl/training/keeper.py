"""Whether what lies in a run folder still holds, and leave to make it again.

Knows recipes, not what is made by them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specctl import run_folder
from specctl.errors import UsageError

Narrate = Callable[[str], None]


class Keeper:
    """narrate: called with each line of narration. may_make: False refuses to make anything."""

    def __init__(self, narrate: Narrate, may_make: bool) -> None:
        self.narrate, self.may_make = narrate, may_make
        self._outdated: set[Path] = set()

    def is_current(self, folder: Path, recipe: dict[str, Any]) -> bool:
        """Whether a folder was made by this recipe; says what differs where it was made by another."""
        found = run_folder.read_recipe(folder)
        if found is None or folder in self._outdated:
            return False
        differences = run_folder.differences(found, recipe)
        if differences:
            self.narrate(f"{folder} was made from another config ({'; '.join(differences)})")
        return not differences

    def announce(self, folder: Path, what: str) -> None:
        """Say what is going to be made. Raises UsageError where nothing may be."""
        if not self.may_make:
            raise UsageError(f"{folder} is missing or stale, and --no-train forbids {what}; run without --no-train")
        self.narrate(what)

    def outdate(self, folder: Path) -> None:
        """Take a folder for outdated, whatever its recipe."""
        self._outdated.add(folder)

    def is_outdated(self, folder: Path) -> bool:
        return folder in self._outdated
