"""Manifests as the command line names them: files, directories, standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from finetune_cli.documents import MAX_FILE_BYTES

STANDARD_INPUT = "-"
SUFFIXES = (".yaml", ".yml", ".json")
"""Files of a directory that are read, as kubectl does."""
_NONE = "no manifest is given; name a FILE, or - for standard input"


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
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{name}: cannot be read ({reason}); give a file in UTF-8, or - for standard input") from error


def one_file(argument: str | None, option: str | None) -> str:
    """The one file that a command takes, behind it or behind -f. Raises InputError."""
    named = [name for name in (argument, option) if name is not None]
    if not named:
        raise InputError(_NONE)
    if len(named) > 1:
        raise InputError(f"{argument} and -f {option} are two manifests; give one of them")
    return named[0]


def read_files(names: Sequence[str]) -> list[tuple[str, str]]:
    """Name and text of every file, those of a directory in order of their names; at least one. Raises InputError."""
    if not names:
        raise InputError(_NONE)
    return [(each, read_text(each)) for name in names for each in _files(name)]


def _files(name: str) -> list[str]:
    directory = Path(name)
    if name == STANDARD_INPUT or not directory.is_dir():
        return [name]
    files = sorted(str(path) for path in directory.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise InputError(f"{name}: holds no {', '.join(SUFFIXES)}; give a file or a directory of manifests")
    return files
