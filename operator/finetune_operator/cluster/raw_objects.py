"""Reads objects that anybody may write: JSON of any content, fields by type, and a count of unreadable values.

Whoever may write labels, annotations, owner references or a status can put anything there that the API server's types allow. A
value of the wrong form is read as absent and its path is noted, so that no such object ends a list, a watch or a pass.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from finetune_operator.cluster.kinds import Kind
from finetune_operator.logs import logger

MOST_NOTES = 4
"""Unreadable values that are noted for one object; more would only make the log line longer."""
SHORT = 64
"""Longest text that is kept once for all objects, in characters: reasons, types, phases, and the Job controller's message about
each Job that succeeded. All objects have the same few."""
MOST_ITEMS = 128
"""Entries of a list that are read."""
LARGEST_NUMBER = 2**63 - 1
"""Largest whole number that the API server stores."""
LONGEST_TIME = 40
"""Characters of an RFC 3339 time with an offset and nanoseconds."""
KEPT_TIMES = 4096
"""Number of parsed times that are cached: many objects report what happens in one second."""
REMEMBERED = 4096
"""Number of versions of objects that are remembered as logged."""
LONGEST_NAME = 64
"""Characters of texts of foreign objects that are logged."""
YEARS = range(1970, 2200)
"""Years of readable times: others overflow as soon as a deadline is added."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_log = logger(__name__)


def read_json(content: bytes) -> Any:
    """Parse JSON. Raises ValueError, and RecursionError if it is nested too deeply even for the standard library."""
    try:
        return from_json(content)
    except ValueError:
        return json.loads(content)


def write_json(value: Any) -> bytes:
    """Return the JSON of a value in UTF-8, without spaces."""
    try:
        return to_json(value)
    except PydanticSerializationError:
        return json.dumps(value, separators=(",", ":")).encode()


@lru_cache(KEPT_TIMES)
def _time(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        return None
    return time if time.tzinfo is not None and time.year in YEARS else None


class Fields:
    """Reads the fields of a JSON object by type. `notes`: paths of what could not be read, shared with every object below it."""

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
        """Note that a value, or this object itself, cannot be read."""
        path = self._below(name) if name else self._path
        if len(self._notes) < MOST_NOTES and path not in self._notes:
            self._notes.append(path)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
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
        """A text that identifies something. One that is too long counts as absent, because a truncated one could name something
        else.
        """
        value = self._text(name)
        if len(value) > longest:
            self.note(name)
            return ""
        # Thousands of objects hold the same names and UIDs.
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


class UnreadableObjects:
    """Logs each version of an object that has unreadable values. The main loop and the watch thread use it; `count` is called
    with the kind.
    """

    def __init__(self, count: Callable[[str], None] | None = None) -> None:
        self._count = count
        self._told: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, kind: Kind, document: Any, paths: tuple[str, ...]) -> None:
        """Log that these values of the object are left out, or the whole object is."""
        metadata = Fields(document).at("metadata")
        namespace, name = metadata.text("namespace", LONGEST_NAME), metadata.text("name", LONGEST_NAME)
        version = (kind.name, metadata.text("uid", LONGEST_NAME) or f"{namespace}/{name}", metadata.text("resourceVersion", 32))
        with self._lock:
            if version in self._told:
                return
            self._told[version] = None
            if len(self._told) > REMEMBERED:
                self._told.popitem(last=False)
        if self._count is not None:
            self._count(kind.name)
        left_out = [path[: 2 * LONGEST_NAME] for path in paths]
        _log.warning("object holds values that cannot be read", kind=kind.name, namespace=namespace, name=name, left_out=left_out)
