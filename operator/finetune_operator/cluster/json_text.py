"""JSON of objects. pydantic's reader and writer take a third of the standard library's time, and the operator does little else.

They refuse some of what the standard library takes (lone surrogates, nesting of more than 200 levels): then that one is asked,
because an object of a stranger must not end the list or the watch in which it comes.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json


def read_json(content: bytes) -> Any:
    """The value. Raises ValueError; RecursionError for what is nested too deep even for the standard library."""
    try:
        return from_json(content)
    except ValueError:
        return json.loads(content)


def write_json(value: Any) -> bytes:
    """UTF-8 without spaces."""
    try:
        return to_json(value)
    except PydanticSerializationError:
        return json.dumps(value, separators=(",", ":")).encode()
