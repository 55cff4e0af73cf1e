"""What publishing remembers between two attempts: uploads that a destination holds open, and the parts that it has of them.

Lines are appended and not synced: a kill loses none, and what a power cut loses is sent again.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path


class Journal:
    """Texts by name; the last one counts. May be used from several threads."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: dict[str, str] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                try:
                    entry = json.loads(line)
                    self._known[str(entry["name"])] = str(entry["value"])
                except (ValueError, KeyError, TypeError):  # the last line of an attempt that was killed
                    continue

    def recall(self, name: str) -> str | None:
        """What was remembered last; None: nothing."""
        with self._lock:
            return self._known.get(name) or None

    def remember(self, name: str, value: str) -> None:
        """Keep it; an empty text is nothing."""
        with self._lock:
            self._known[name] = value
            # Addresses of open uploads may open them to whoever reads them.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                # A line that a kill cut off must not swallow this one.
                os.write(descriptor, b"\n" + json.dumps({"name": name, "value": value}).encode() + b"\n")
            finally:
                os.close(descriptor)

    def forget(self) -> None:
        """Everything is published."""
        with self._lock:
            self._known.clear()
            self._path.unlink(missing_ok=True)
