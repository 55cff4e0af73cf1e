"""How large a spec may be, as it is stored.

The plan repeats the spec in a ConfigMap, which holds 1 MiB, and the spec lies in etcd beside its status, in 1.5 MiB. A schema bounds
every field by itself and neither their sum nor the free-form settings of a method, so the whole is measured before anything else
is looked at.
"""

from __future__ import annotations

import json
from typing import Any

MAX_SPEC_BYTES = 256 << 10
"""Of the spec of a job. Its plan is at most three times as large (tests/unit/contract/test_bounds.py has the largest)."""
MAX_PROFILE_BYTES = 128 << 10
"""Of the spec of a profile, which the plan repeats, too."""
_ESCAPED = "<>&"
"""Written as six characters by the API server, as is all that is not ASCII."""


def stored_bytes(content: Any) -> int:
    """Bytes of a value as JSON, in the longest way that anybody on its way writes it."""
    text = json.dumps(content, separators=(",", ":"), default=str, skipkeys=True)
    return len(text) + 5 * sum(map(text.count, _ESCAPED))


def check_size(content: Any, most: int) -> None:
    """Raises ValueError, which names the part to shorten."""
    try:
        size = stored_bytes(content)
        if size <= most:
            return
        path, of_it = _largest(content, size)
    except RecursionError:
        raise ValueError("is nested too deeply to be read; write the settings without nesting") from None
    named = f"shorten {path}, which has {of_it} of them" if path else "shorten its values, or leave some out"
    raise ValueError(f"has {size} bytes as JSON in ASCII, and no more than {most} can be kept with its plan and status; {named}")


def _largest(content: Any, size: int) -> tuple[str, int]:
    """Path and size of the smallest part that alone holds more than half of everything; no path where no field does."""
    path = ""
    whole = size
    while isinstance(content, dict) and content:
        part = {name: stored_bytes(value) for name, value in content.items()}
        name = max(part, key=part.__getitem__)
        if part[name] * 2 <= whole:
            break
        path, size, content = f"{path}.{name}" if path else str(name), part[name], content[name]
    return path[:200], size
