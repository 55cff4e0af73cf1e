"""How large a spec may be, as it is stored.

The plan repeats the spec in a ConfigMap, which holds 1 MiB, and etcd keeps the spec with its status, in 1.5 MiB. A schema bounds
every field by itself, but neither their sum nor the free-form settings of a method, so the whole is measured before anything else
is looked at.
"""

from __future__ import annotations

import json
from typing import Any

MAX_SPEC_BYTES = 256 << 10
"""Of the spec of a job. tests/hostile/test_largest_specs.py knows how large a plan it makes."""
MAX_PROFILE_BYTES = 128 << 10
"""Of the spec of a profile, which the plan repeats, too."""
_ESCAPED = "<>&"
"""Written as six characters by the API server, as is all that is not ASCII."""
_MAX_VALUES = 50_000
"""Among more, the part to shorten is not looked for any deeper: it would take longer than a pass of the operator may."""
_Parts = dict[str, tuple[int, int]]
"""Bytes and number of values by field."""


def json_bytes(content: Any) -> int:
    """Bytes of a value as JSON, in the longest way that anybody on its way writes it."""
    return _size_and_count(content)[0]


def check_size(content: Any, most: int) -> None:
    """Raises ValueError, which names the part to shorten."""
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
    """Bytes, and about as many values as there are."""
    text = json.dumps(content, separators=(",", ":"), default=str, skipkeys=True)
    return len(text) + 5 * sum(map(text.count, _ESCAPED)), text.count(",")


def _parts(content: Any) -> tuple[int, _Parts]:
    """Bytes of a value, and its fields."""
    if not isinstance(content, dict):
        return json_bytes(content), {}
    parts = {name: _size_and_count(value) for name, value in content.items()}
    punctuation = 2 + len(parts) + max(len(parts) - 1, 0)
    return punctuation + sum(json_bytes(name) + size for name, (size, _) in parts.items()), parts


def _largest(content: Any, size: int, parts: _Parts) -> tuple[str, int]:
    """Path and size of the smallest part that alone holds more than half of everything; no path where no field does."""
    path = ""
    while parts:
        name = max(parts, key=lambda name: parts[name][0])
        part, values = parts[name]
        if part * 2 <= size:
            break
        path, size, content = f"{path}.{name}" if path else str(name), part, content[name]
        parts = _parts(content)[1] if values < _MAX_VALUES else {}
    return path[:200], size
