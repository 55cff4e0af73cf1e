"""The limit on the size of a stored spec.

The plan repeats the spec in a ConfigMap, which holds 1 MiB, and etcd keeps the spec with its status, in 1.5 MiB. A schema bounds
each field, but neither their sum nor the free-form settings of a method, so the whole spec is measured before anything else is
checked.
"""

from __future__ import annotations

import json
from typing import Any

MAX_SPEC_BYTES = 256 << 10
"""Largest spec of a job. tests/hostile/test_largest_specs.py measures the plan that follows from it."""
MAX_PROFILE_BYTES = 128 << 10
"""Largest spec of a profile, which is repeated in the plan."""
_ESCAPED = "<>&"
"""Characters that the API server escapes as six characters, as it does all that are not ASCII."""
_MAX_VALUES = 50_000
"""Number of values above which a part is not searched for a smaller part to shorten: the search would hold up the operator."""
_Parts = dict[str, tuple[int, int]]
"""Name of a field -> bytes and number of its values."""


def json_bytes(content: Any) -> int:
    """Count the bytes of a value as JSON, in the longest form in which a program that handles it writes it."""
    return _size_and_count(content)[0]


def check_size(content: Any, most: int) -> None:
    """Refuse a spec that is too large. Raises ValueError, which names the part to shorten."""
    try:
        size, parts = _parts(content)
        if size <= most:
            return
        path, size_of_it = _largest(content, size, parts)
    except RecursionError:
        raise ValueError("is nested too deeply to be read; write the settings without nesting") from None
    named = f"shorten {path}, which has {size_of_it} of them" if path else "shorten its values, or leave some out"
    raise ValueError(f"has {size} bytes as JSON in ASCII, and no more than {most} can be kept with its plan and status; {named}")


def _size_and_count(content: Any) -> tuple[int, int]:
    """Return the bytes of a value as JSON, and roughly the number of values in it."""
    text = json.dumps(content, separators=(",", ":"), default=str, skipkeys=True)
    return len(text) + 5 * sum(map(text.count, _ESCAPED)), text.count(",")


def _parts(content: Any) -> tuple[int, _Parts]:
    """Return the bytes of a value as JSON, and the sizes of its fields."""
    if not isinstance(content, dict):
        return json_bytes(content), {}
    parts = {name: _size_and_count(value) for name, value in content.items()}
    punctuation = 2 + len(parts) + max(len(parts) - 1, 0)
    return punctuation + sum(json_bytes(name) + size for name, (size, _) in parts.items()), parts


def _largest(content: Any, size: int, parts: _Parts) -> tuple[str, int]:
    """Find the smallest part with more than half of all bytes, as path and size; the path is empty if there is none."""
    path = ""
    while parts:
        name = max(parts, key=lambda name: parts[name][0])
        part, values = parts[name]
        if part * 2 <= size:
            break
        path, size, content = f"{path}.{name}" if path else str(name), part, content[name]
        parts = _parts(content)[1] if values < _MAX_VALUES else {}
    return path[:200], size
