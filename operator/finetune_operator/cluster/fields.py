"""Typed reading of raw objects.

Whoever may write labels, annotations, owner references or a status can put anything there that the API server's types allow:
digits that are no ASCII digits, a year that Python does not know, a text of a megabyte. A value that is not what it should be
is read as absent and its path is noted; nothing here raises.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

MOST_NOTES = 4
"""Unreadable values noted of one object; more would only make the log line longer."""
SHORT = 32
"""Characters of texts that are reasons, types and phases: every object has the same few."""
MOST_ITEMS = 128
"""Entries of a list that are looked at."""
LARGEST_NUMBER = 2**63 - 1
"""What the API server keeps of a whole number."""
YEARS = range(1970, 2200)
"""Times outside overflow as soon as a deadline is added to them."""
LONGEST_TIME = 40
"""Characters of an RFC 3339 time with an offset and nanoseconds."""
KEPT_TIMES = 4096
"""Parsed times that are kept to be used again: what happens in one second is told by many objects."""
_NUMBER = re.compile(r"[0-9]{1,18}")


@lru_cache(KEPT_TIMES)
def _time(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        return None
    return time if time.tzinfo is not None and time.year in YEARS else None


class Fields:
    """A JSON object of which nothing is known. `notes`: paths of what could not be read, shared with every object below it."""

    __slots__ = ("_notes", "_path", "_raw")

    def __init__(self, raw: Any, path: str = "", notes: list[str] | None = None) -> None:
        self._notes: list[str] = [] if notes is None else notes
        self._path = path
        self._raw: dict[str, Any] = raw if isinstance(raw, dict) else {}
        if raw is not None and not isinstance(raw, dict):
            self.note()

    @property
    def notes(self) -> tuple[str, ...]:
        """Paths of what could not be read so far."""
        return tuple(self._notes)

    @property
    def raw(self) -> dict[str, Any]:
        """The object as it is."""
        return self._raw

    def note(self, name: str = "") -> None:
        """Say that a value, or this object itself, cannot be read."""
        path = self._below(name) if name else self._path
        if len(self._notes) < MOST_NOTES and path not in self._notes:
            self._notes.append(path)

    def has(self, name: str) -> bool:
        """Whether there is anything but null."""
        return self._raw.get(name) is not None

    def at(self, name: str) -> Fields:
        """The object of that name, empty where there is none."""
        return Fields(self._raw.get(name), self._below(name), self._notes)

    def items(self, name: str) -> Iterator[Fields]:
        """The objects of a list."""
        values = self._raw.get(name)
        if values is not None and not isinstance(values, list):
            self.note(name)
            return
        for value in (values or ())[:MOST_ITEMS]:
            yield Fields(value, self._below(name), self._notes)

    def text(self, name: str, longest: int) -> str:
        """A text, cut to its first characters; empty where there is none."""
        value = self._text(name)[:longest]
        return sys.intern(value) if len(value) <= SHORT else value

    def last_of_text(self, name: str, longest: int) -> str:
        """A text, cut to its last characters."""
        return self._text(name)[-longest:]

    def name(self, name: str, longest: int = 253) -> str:
        """A text that identifies something: one that is too long is none, since what is left of it would be another's."""
        value = self._text(name)
        if len(value) > longest:
            self.note(name)
            return ""
        # The same names and UIDs stand in thousands of objects.
        return sys.intern(value)

    def flag(self, name: str) -> bool:
        """A boolean; absent is false."""
        value = self._raw.get(name)
        if value is not None and not isinstance(value, bool):
            self.note(name)
        return value is True

    def integer(self, name: str) -> int | None:
        """A whole number that fits 64 bits."""
        value = self._raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST_NUMBER:
            self.note(name)
            return None
        return value

    def digits(self, name: str) -> int | None:
        """A whole number written as a text, as labels, annotations and versions are."""
        value = self._text(name)
        if not value:
            return None
        if _NUMBER.fullmatch(value) is None:
            self.note(name)
            return None
        return int(value)

    def time(self, name: str) -> datetime | None:
        """An RFC 3339 time with its offset."""
        value = self._text(name)
        if not value:
            return None
        time = _time(value) if len(value) <= LONGEST_TIME else None
        if time is None:
            self.note(name)
        return time

    def _text(self, name: str) -> str:
        value = self._raw.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            self.note(name)
            return ""
        return value

    def _below(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name
