"""Reads objects of the API server, which may hold anything: a value of an unexpected form is treated as absent."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def part(content: object, *keys: str) -> Mapping[str, Any]:
    """Return the object at these keys, or an empty object."""
    item = value(content, *keys)
    return item if isinstance(item, Mapping) else {}


def value(content: object, *keys: str) -> Any:
    """Return the value at these keys, or None."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def text(content: object, *keys: str) -> str:
    """Return the text at these keys, or an empty text."""
    item = value(content, *keys)
    return item if isinstance(item, str) else ""


def number(content: object, *keys: str) -> int | None:
    """Return the whole number at these keys, or None."""
    item = value(content, *keys)
    return item if isinstance(item, int) and not isinstance(item, bool) else None


def elements(content: object, *keys: str) -> list[Mapping[str, Any]]:
    """Return the objects of the list at these keys."""
    item = value(content, *keys)
    return [element for element in item if isinstance(element, Mapping)] if isinstance(item, list) else []


def texts(content: object, *keys: str) -> dict[str, str]:
    """Return the strings of the object at these keys, such as labels."""
    return {str(key): element for key, element in part(content, *keys).items() if isinstance(element, str)}


def moment(written: str) -> datetime | None:
    """Parse a time from the API server, and return it in UTC; None if the text is no time that Python can represent."""
    try:
        parsed = datetime.fromisoformat(written)
        return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def decimal(written: str) -> float | None:
    """Parse a finite number from a status; None if the text is not one."""
    try:
        parsed = float(written)
    except ValueError:
        return None
    return parsed if abs(parsed) < float("inf") else None
