"""Calls of tools in the form before `tool_calls`: the key `function_call` of a turn, the role `function`, and `functions` of a
record. Templates know only the newer form and silently leave this one out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

CALL, FUNCTIONS = "function_call", "functions"
_ROLE, _NEWER_ROLE = "function", "tool"


def call_of(turn: Any) -> Any:
    """The call of a turn in this form, which may be malformed. Returns None for no call, an empty text or nulls."""
    call = turn.get(CALL) if isinstance(turn, dict) else None
    parts = call.values() if isinstance(call, dict) else [call]
    return None if all(part in (None, "", []) for part in parts) else call


def has_older_calls(turns: Sequence[Any]) -> bool:
    """Whether a turn of a chat calls a tool in this form."""
    return any(call_of(turn) is not None for turn in turns)


def is_call(value: Any) -> bool:
    """Whether `value` is a valid `function_call`: an object with the name of a function."""
    return isinstance(value, dict) and isinstance(value.get("name"), str) and bool(value["name"].strip())


def newer_turn(turn: Mapping[str, Any], role_key: str, named_roles: Collection[str]) -> dict[str, Any]:
    """A turn of such a chat in the newer form. named_roles: roles that the manifest's mapping names."""
    newer = {name: value for name, value in turn.items() if name != CALL}
    call = call_of(turn)
    if call is not None and not turn.get("tool_calls"):
        newer["tool_calls"] = [_wrapped(call)]
    if turn.get(role_key) == _ROLE and _ROLE not in named_roles:
        newer[role_key] = _NEWER_ROLE
    return newer


def newer_tools(functions: Any) -> list[dict[str, Any]] | None:
    """The functions in the form of `tools`, or None if `functions` describes none; other data may use this name, too."""
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
