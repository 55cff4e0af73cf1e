"""Reads objects of the API server whatever is in them: what has another form than it should counts as absent."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def part(content: object, *keys: str) -> Mapping[str, Any]:
    """The object at these keys, or an empty one."""
    found = value(content, *keys)
    return found if isinstance(found, Mapping) else {}


def value(content: object, *keys: str) -> Any:
    """The value at these keys, or None."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def text(content: object, *keys: str) -> str:
    """The text at these keys, or an empty one."""
    found = value(content, *keys)
    return found if isinstance(found, str) else ""


def number(content: object, *keys: str) -> int | None:
    """The whole number at these keys, or None."""
    found = value(content, *keys)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def elements(content: object, *keys: str) -> list[Mapping[str, Any]]:
    """The objects of the list at these keys."""
    found = value(content, *keys)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def texts(content: object, *keys: str) -> dict[str, str]:
    """The texts of the object at these keys, such as labels."""
    return {str(key): one for key, one in part(content, *keys).items() if isinstance(one, str)}


def moment(said: str) -> datetime | None:
    """A time of the API server, in UTC, or None; also for one that is before or after all of Python's."""
    try:
        found = datetime.fromisoformat(said)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def decimal(said: str) -> float | None:
    """A number in a status, or None; not one that is infinite."""
    try:
        found = float(said)
    except ValueError:
        return None
    return found if abs(found) < float("inf") else None
