"""Files of JSON lines that grow while a run lives: a crash may cut off the last line, a full disk may hold some back."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune_trainer.files import append_to_own, open_regular

log = logging.getLogger(__name__)
TAIL_BYTES = 1 << 20
"""Of a file of which only the end is of interest: some thousand lines."""


class JsonLines:
    """An open file of lines. A full disk never ends a run here: what cannot be written goes out with the next line that can."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._descriptor = append_to_own(path)
        size = os.fstat(self._descriptor).st_size
        # A line that a crash cut off must not swallow the next one.
        self._unwritten = b"\n" if size and os.pread(self._descriptor, 1, size - 1) != b"\n" else b""
        self._has_failed = False

    def append(self, values: Mapping[str, Any]) -> None:
        """Add one line."""
        self._unwritten += (json.dumps(values, allow_nan=False) + "\n").encode()
        try:
            self._write()
        except OSError as error:
            if not self._has_failed:
                log.warning("%s cannot be written (%s); its lines are kept in memory until it can", self._path, error)
            self._has_failed = True
        else:
            self._unwritten, self._has_failed = b"", False

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self) -> None:
        size = os.fstat(self._descriptor).st_size
        left = memoryview(self._unwritten)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise


def read_lines(text: str) -> list[dict[str, Any]]:
    """The objects in a file of lines; a line that is not one, such as one that was cut off, is passed over."""
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in the last TAIL_BYTES of a file; none if there is no such file. Raises SpecialFileError, OSError."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL_BYTES))
        # Where the file is longer, the first of these is the end of a line.
        return read_lines(file.read(TAIL_BYTES).decode(errors="replace"))
