"""Finds the lines that matter to users, those of the trainer's own log, in the output file of a role."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LONGEST_READ_BYTES = 65_536
"""Maximum number of bytes that are read at once; if a role has written more, the earlier bytes are skipped."""
_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ (?P<level>INFO|WARNING|ERROR) (?P<logger>finetune_trainer\.[\w.]+) (?P<message>.+)")
_WAITING = "finetune_trainer.network.retry"


@dataclass(frozen=True)
class SaidLine:
    """One line of a role's log."""

    message: str
    is_waiting: bool = False
    """Whether something has failed and is tried again, after the pause that the message names."""


class RoleOutput:
    """An output file, read from its beginning or from its current end."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path, self._rest = path, b""
        self._offset = _size(path) if from_end else 0

    def new_lines(self) -> list[SaidLine]:
        """Return the lines that were added since the last call; none if the file cannot be read."""
        end = _size(self._path)
        if end - self._offset > LONGEST_READ_BYTES:
            self._offset, self._rest = end - LONGEST_READ_BYTES, b""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read(LONGEST_READ_BYTES)
        except OSError:
            return []
        self._offset += len(content)
        *whole, rest = (self._rest + content).split(b"\n")
        self._rest = rest[-LONGEST_READ_BYTES:]
        # Other lines come from libraries, or are part of a longer text.
        matches = filter(None, (_LINE.fullmatch(line.decode(errors="replace").rstrip()) for line in whole))
        return [SaidLine(match["message"], match["logger"] == _WAITING) for match in matches]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
