"""Checks values of any JSON type, in fields whose names this API does not know, such as settings of a method."""

import re
from typing import Any

MAX_JSON_VALUES = 64
"""Maximum number of names."""
MAX_SETTING_TEXT = 4096
MAX_SETTING_KEY = 512
MAX_SETTING_ITEMS = 1024
MAX_SETTING_DEPTH = 8
MAX_SETTING_VALUES = 10_000
"""Maximum number of values in all settings together, at every depth."""
_LARGEST_INTEGER = 2**63 - 1


def _fault(value: Any, depth: int = 1) -> tuple[str, str] | None:
    """Return what is wrong with a value, None if nothing: its place inside the value, and the reason with its fix.

    A correct value survives every JSON round trip unchanged, and PEFT's data classes can hold it. The place is put together only
    here, so a large value costs no more than its size.
    """
    if depth > MAX_SETTING_DEPTH:
        return "", f"is nested deeper than {MAX_SETTING_DEPTH}; no setting is"
    match value:
        case None | bool():
            return None
        case int():
            too_large = abs(value) > _LARGEST_INTEGER
            return ("", "is larger than any integer in Kubernetes; write a smaller one") if too_large else None
        case str():
            return _fault_of_text(value, MAX_SETTING_TEXT)
        case float():
            return "", f'floats do not survive every JSON round trip unchanged; write "{value}" in quotes'
        case list():
            if len(value) > MAX_SETTING_ITEMS:
                return "", f"has {len(value)} items; at most {MAX_SETTING_ITEMS} are allowed"
            for number, item in enumerate(value):
                if (fault := _fault(item, depth + 1)) is not None:
                    return f"[{number}]{fault[0]}", fault[1]
            return None
        case dict():
            if len(value) > MAX_SETTING_ITEMS:
                return "", f"has {len(value)} entries; at most {MAX_SETTING_ITEMS} are allowed"
            for name, item in value.items():
                if (fault := _fault_of_text(name, MAX_SETTING_KEY) or _fault(item, depth + 1)) is not None:
                    return f".{ascii(name)[1:-1]:.100}{fault[0]}", fault[1]
            return None
        case _:
            return "", f"is a {type(value).__name__}; write a number, a string, true, false or a list of these"


def _fault_of_text(text: str, longest: int) -> tuple[str, str] | None:
    if len(text) > longest:
        return "", f"has {len(text)} characters; at most {longest} are allowed"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "", f"holds {ascii(text)[:60]}, which is not valid Unicode; write it in UTF-8"
    return None


def _count(value: Any) -> int:
    """Count the values in a value, including itself. Stops above the limit, and at the maximum depth."""
    total, level = 0, [value]
    for _ in range(MAX_SETTING_DEPTH + 1):
        total += len(level)
        if total > MAX_SETTING_VALUES:
            break
        level = [
            item
            for each in level
            if isinstance(each, list | dict)
            for item in (each if isinstance(each, list) else each.values())
        ]
    return total


def check_json_values(values: dict[str, Any], name_pattern: re.Pattern[str], what: str) -> dict[str, Any]:
    """Return the values. Raises ValueError for a name that is not `what` and a value that JSON or Kubernetes would change."""
    if _count(values) > MAX_SETTING_VALUES:
        raise ValueError(f"holds more than {MAX_SETTING_VALUES} values; no method has so many")
    for name, value in values.items():
        if not name_pattern.fullmatch(name):
            raise ValueError(f"{name[:80]!a} is not {what}")
        if (fault := _fault(value)) is not None:
            raise ValueError(f"{name}{fault[0][:200]}: {fault[1]}")
    return values
