"""Reads objects that anybody may have written, field by field with type checks, and records unreadable values.

Labels, annotations, owner references and status may contain anything that the API server's types allow. A malformed value is
treated as absent and its path is noted, so that no object can break a list, a watch or a pass.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from finetune_operator.client.kinds import Kind
from finetune_operator.logs import logger

MOST_NOTES = 4
"""Maximum number of unreadable values noted per object; more would only make the log line longer."""
MOST_ITEMS = 128
"""Maximum number of list items that are read."""
LARGEST_NUMBER = 2**63 - 1
"""Largest whole number that the API server stores."""
LONGEST_TIME = 40
"""Maximum length of a time, in characters: enough for RFC 3339 with nanoseconds and an offset."""
REMEMBERED = 4096
"""Number of object versions to remember, so that each is logged only once."""
LONGEST_NAME = 64
"""Maximum length of a foreign object's namespace, name or UID in the log, in characters."""
YEARS = range(1970, 2200)
"""Years in which times are accepted: in other years, adding a deadline to a time might overflow."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_log = logger(__name__)


class Fields:
    """Reads the fields of a JSON object by type. `notes`: paths of unreadable values, shared with all nested objects."""

    __slots__ = ("_notes", "_path", "_raw")

    def __init__(self, raw: Any, path: str = "", notes: list[str] | None = None) -> None:
        self._notes: list[str] = [] if notes is None else notes
        self._path = path
        self._raw: dict[str, Any] = raw if isinstance(raw, dict) else {}
        if raw is not None and not isinstance(raw, dict):
            self.note()

    @property
    def notes(self) -> tuple[str, ...]:
        """Paths of all values so far that could not be read."""
        return tuple(self._notes)

    @property
    def raw(self) -> dict[str, Any]:
        """The object as it was received; empty if it was not an object."""
        return self._raw

    def note(self, name: str = "") -> None:
        """Record that a value, or this object itself, cannot be read."""
        path = self._below(name) if name else self._path
        if len(self._notes) < MOST_NOTES and path not in self._notes:
            self._notes.append(path)

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._raw.get(name) is not None

    def at(self, name: str) -> Fields:
        """The nested object with that name; empty if it is missing."""
        return Fields(self._raw.get(name), self._below(name), self._notes)

    def items(self, name: str) -> Iterator[Fields]:
        """Yield the objects in the list with that name."""
        values = self._raw.get(name)
        if values is not None and not isinstance(values, list):
            self.note(name)
            return
        for value in (values or ())[:MOST_ITEMS]:
            yield Fields(value, self._below(name), self._notes)

    def text(self, name: str, longest: int) -> str:
        """A string, cut off at the end if it is longer than `longest`; empty if it is missing."""
        return self._text(name)[:longest]

    def last_of_text(self, name: str, longest: int) -> str:
        """A string, cut off at the beginning if it is longer than `longest`."""
        return self._text(name)[-longest:]

    def name(self, name: str, longest: int = 253) -> str:
        """A string that identifies something; empty if it is too long, because a cut name could identify something else."""
        value = self._text(name)
        if len(value) > longest:
            self.note(name)
            return ""
        return value

    def flag(self, name: str) -> bool:
        """A boolean; false if it is missing."""
        value = self._raw.get(name)
        if value is not None and not isinstance(value, bool):
            self.note(name)
        return value is True

    def integer(self, name: str) -> int | None:
        """A whole number that fits into 64 bits; None if it is missing or unreadable."""
        value = self._raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST_NUMBER:
            self.note(name)
            return None
        return value

    def digits(self, name: str) -> int | None:
        """A whole number that is stored as a string, as in labels, annotations and versions."""
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
        try:
            time = datetime.fromisoformat(value) if len(value) <= LONGEST_TIME else None
        except (ValueError, OverflowError):
            time = None
        if time is None or time.tzinfo is None or time.year not in YEARS:
            self.note(name)
            return None
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


class UnreadableObjects:
    """Logs each version of an object that has unreadable values. `count` is called with the kind."""

    def __init__(self, count: Callable[[str], None] | None = None) -> None:
        self._count = count
        self._reported: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    def note(self, kind: Kind, document: Any, paths: tuple[str, ...]) -> None:
        """Log that these values of the object, or the whole object, are ignored."""
        metadata = Fields(document).at("metadata")
        namespace, name = metadata.text("namespace", LONGEST_NAME), metadata.text("name", LONGEST_NAME)
        version = (kind.name, metadata.text("uid", LONGEST_NAME) or f"{namespace}/{name}", metadata.text("resourceVersion", 32))
        if version in self._reported:
            return
        self._reported[version] = None
        if len(self._reported) > REMEMBERED:
            self._reported.popitem(last=False)
        if self._count is not None:
            self._count(kind.name)
        left_out = [path[: 2 * LONGEST_NAME] for path in paths]
        _log.warning("object holds values that cannot be read", kind=kind.name, namespace=namespace, name=name, left_out=left_out)
