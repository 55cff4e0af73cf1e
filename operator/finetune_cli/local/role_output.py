"""Lines of the trainer's own log in a role's output file that matter to a user."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LONGEST_READ_BYTES = 65_536
"""At one look; what a role has written beyond that is left out."""
_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ (?P<level>INFO|WARNING|ERROR) (?P<logger>finetune_trainer\.[\w.]+) (?P<message>.+)")
_WAITING = "finetune_trainer.network.retry"


@dataclass(frozen=True)
class SaidLine:
    """One line of a role's log."""

    message: str
    is_waiting: bool = False
    """Whether something has failed and is tried again, after the pause that the message names."""


def said_line(line: str) -> SaidLine | None:
    """The trainer's message in a line of its output; None: the line comes from a library, or is part of a longer text."""
    match = _LINE.fullmatch(line.rstrip())
    return None if match is None else SaidLine(match["message"], match["logger"] == _WAITING)


class RoleOutput:
    """An output file, read from its beginning, or from where it ends now."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path, self._rest = path, b""
        self._offset = _size(path) if from_end else 0

    def new_lines(self) -> list[SaidLine]:
        """Lines that were added since the last look; none if the file cannot be read."""
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
        messages = (said_line(line.decode(errors="replace")) for line in whole)
        return [line for line in messages if line is not None]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
