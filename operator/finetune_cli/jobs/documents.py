"""Reads objects of the API server whatever is in them: what has another form than it should counts as absent."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def part(content: object, *keys: str) -> Mapping[str, Any]:
    """The object at these keys, or an empty one."""
    item = value(content, *keys)
    return item if isinstance(item, Mapping) else {}


def value(content: object, *keys: str) -> Any:
    """The value at these keys, or None."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def text(content: object, *keys: str) -> str:
    """The text at these keys, or an empty one."""
    item = value(content, *keys)
    return item if isinstance(item, str) else ""


def number(content: object, *keys: str) -> int | None:
    """The whole number at these keys, or None."""
    item = value(content, *keys)
    return item if isinstance(item, int) and not isinstance(item, bool) else None


def elements(content: object, *keys: str) -> list[Mapping[str, Any]]:
    """The objects of the list at these keys."""
    item = value(content, *keys)
    return [one for one in item if isinstance(one, Mapping)] if isinstance(item, list) else []


def texts(content: object, *keys: str) -> dict[str, str]:
    """The texts of the object at these keys, such as labels."""
    return {str(key): one for key, one in part(content, *keys).items() if isinstance(one, str)}


def moment(written: str) -> datetime | None:
    """A time of the API server, in UTC, or None; also for one that is before or after all of Python's."""
    try:
        parsed = datetime.fromisoformat(written)
        return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def decimal(written: str) -> float | None:
    """A number in a status, or None; not one that is infinite."""
    try:
        parsed = float(written)
    except ValueError:
        return None
    return parsed if abs(parsed) < float("inf") else None
