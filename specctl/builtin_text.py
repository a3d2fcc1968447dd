"""Text that every Python has on disk: the sources of its standard library, and the English prose beside them.

Knows nothing about corpora; what it yields depends on the Python version.
"""

import fnmatch
import io
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from specctl.errors import UsageError

SECTION_CHARACTERS = 4_000
SKIPPED_FOLDERS = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("__pycache__", "lib-dynload", "pydoc_data", "msilib", "config-*"),
)
CODE_TABLES = (
    *("aliases", "cp*", "iso*", "mac_*", "koi8_*", "kz1048", "big5*", "euc_*", "gb*", "hp_roman8", "hz"),
    *("johab", "palmos", "ptcp154", "shift_jis*", "tis_620"),
)
GENERATED_TABLES = (
    *("_sysconfigdata*.py", "html/entities.py", "stringprep.py"),
    *(f"encodings/{name}.py" for name in CODE_TABLES),
)
PROSE_FILES = ("*.txt", "*.rst", "README*")
NOT_PROSE = ("lib2to3/*Grammar*.txt", "config-*", "idlelib/Icons/*")


def python_stdlib() -> Iterator[str]:
    """Yield the sources, without tests, packages and generated tables."""
    root = _stdlib_folder()
    for path in _walk(root, ("*.py",)):
        if not _matches(path.relative_to(root).as_posix(), GENERATED_TABLES):
            data = path.read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)  # a few sources are not UTF-8
            yield data.decode(encoding)


def python_docs() -> Iterator[str]:
    """Yield the language reference and the text files, in sections."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield from _sections(topics[name])
    root = _stdlib_folder()
    for path in _walk(root, PROSE_FILES):
        if not _matches(path.relative_to(root).as_posix(), NOT_PROSE):
            # old change logs hold stray Latin-1 names
            yield from _sections(path.read_bytes().decode("utf-8", errors="replace"))


def _sections(text: str) -> Iterator[str]:
    """Cut a long text at blank lines: a few huge documents would leave the split by hash to luck."""
    section = ""
    for paragraph in re.split(r"(?<=\n\n)", text):
        section += paragraph
        if len(section) >= SECTION_CHARACTERS:
            yield section
            section = ""
    yield section


def _stdlib_folder() -> Path:
    folder = Path(sysconfig.get_path("stdlib"))
    if not folder.is_dir():
        raise UsageError(f"this Python has no standard library folder ({folder}): give the corpus paths instead")
    return folder


def _walk(root: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files below the standard library's root that match, sorted, without tests and packages."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _matches(name, SKIPPED_FOLDERS)]  # not entered at all
        found += [Path(folder, name) for name in names if _matches(name, patterns)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
