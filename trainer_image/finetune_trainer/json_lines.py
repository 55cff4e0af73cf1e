"""Appends to and reads files of JSON lines. A crash may truncate the last line; a full disk may delay lines."""

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
"""Number of bytes that are read if only the end of a file matters: several thousand lines."""


class JsonLines:
    """An open JSON Lines file. A full disk does not end a run: unwritten lines stay in memory, and are written with the next."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._descriptor = append_to_own(path)
        size = os.fstat(self._descriptor).st_size
        # The next line must not continue a line that a crash cut off.
        self._unwritten = b"\n" if size and os.pread(self._descriptor, 1, size - 1) != b"\n" else b""
        self._has_failed = False

    def append(self, values: Mapping[str, Any]) -> None:
        """Append one line."""
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
        remaining = memoryview(self._unwritten)
        try:
            while remaining:
                remaining = remaining[os.write(self._descriptor, remaining) :]
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise


def read_lines(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects in the text of a JSON Lines file. Other lines, such as a truncated one, are skipped."""
    objects = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def last_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in the last TAIL_BYTES of a file; empty if there is no such file. Raises SpecialFileError, OSError."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL_BYTES))
        # In a longer file, the first line of this part may be incomplete; it is then skipped.
        return read_lines(file.read(TAIL_BYTES).decode(errors="replace"))
