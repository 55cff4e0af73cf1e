"""Calls of tools in the form of before `tool_calls`: the key `function_call` of a turn, the role `function`, and `functions` of a
record. Templates know the newer form alone, and leave this one out without a word.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

CALL, FUNCTIONS = "function_call", "functions"
_ROLE, _NEWER_ROLE = "function", "tool"


def call_of(turn: Any) -> Any:
    """What a turn calls in this form, whatever that is; None: nothing, for which programs write an empty text or nulls, too."""
    call = turn.get(CALL) if isinstance(turn, dict) else None
    parts = call.values() if isinstance(call, dict) else [call]
    return None if all(part in (None, "", []) for part in parts) else call


def has_older_calls(turns: Sequence[Any]) -> bool:
    """Whether a turn of a chat calls a tool in this form."""
    return any(call_of(turn) is not None for turn in turns)


def is_call(value: Any) -> bool:
    """Whether it is what `function_call` holds: an object with the name of a function."""
    return isinstance(value, dict) and isinstance(value.get("name"), str) and bool(value["name"].strip())


def newer_turn(turn: Mapping[str, Any], role_key: str, named_roles: Collection[str]) -> dict[str, Any]:
    """A turn of such a chat in the newer form. named_roles: those that the manifest gives a meaning of its own."""
    newer = {name: value for name, value in turn.items() if name != CALL}
    call = call_of(turn)
    if call is not None and not turn.get("tool_calls"):
        newer["tool_calls"] = [_wrapped(call)]
    if turn.get(role_key) == _ROLE and _ROLE not in named_roles:
        newer[role_key] = _NEWER_ROLE
    return newer


def newer_tools(functions: Any) -> list[dict[str, Any]] | None:
    """What `functions` of a record describes, as `tools` does; None if it describes none, as under this name it need not."""
    if isinstance(functions, str):
        try:
            functions = json.loads(functions)
        except (ValueError, RecursionError):
            return None
    if not isinstance(functions, list) or not all(map(is_call, functions)):
        return None
    return [_wrapped(function) for function in functions]


def _wrapped(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": dict(function)}
