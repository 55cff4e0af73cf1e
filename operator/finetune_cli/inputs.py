"""Manifests as the command line names them: files, directories, standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from finetune_cli.documents import MAX_FILE_BYTES

STANDARD_INPUT = "-"
SUFFIXES = (".yaml", ".yml", ".json")
"""Files of a directory that are read, as kubectl does."""


class InputError(Exception):
    """A file that cannot be read."""


def read_text(name: str) -> str:
    """The text of a file. Raises InputError."""
    try:
        # One byte more than is taken tells a file that is too large without reading all of it.
        if name == STANDARD_INPUT:
            return sys.stdin.buffer.read(MAX_FILE_BYTES + 1).decode()
        with Path(name).open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}: cannot be read ({error}); give a file in UTF-8, or - for standard input") from error


def read_files(names: Sequence[str]) -> list[tuple[str, str]]:
    """Name and text of every file, those of a directory in order of their names. Raises InputError."""
    return [(each, read_text(each)) for name in names for each in _files(name)]


def _files(name: str) -> list[str]:
    directory = Path(name)
    if name == STANDARD_INPUT or not directory.is_dir():
        return [name]
    found = sorted(str(path) for path in directory.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not found:
        raise InputError(f"{name}: holds no {', '.join(SUFFIXES)}; give a file or a directory of manifests")
    return found
