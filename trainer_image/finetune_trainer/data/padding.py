"""Removes nulls that stand for missing keys from a chat's tool descriptions and from the arguments of its tool calls.

A table stores all tools in the same columns. When it is written as JSON Lines, each tool therefore has the parameters of all
other tools with the value null, and each call has the arguments of all other calls. Training on such records would teach the
model to write these nulls. A null argument is kept if the description of the tool allows it. Called by parse.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from finetune_trainer.data.records import Message, called_name, with_arguments

_MAY_BE_NULL = frozenset({"default", "const", "example", "examples"})
"""Keywords of a JSON schema whose value may be null."""


def without_nulls(value: Any) -> Any:
    """The value without keys whose value is null, at every depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def tools_without_padding(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools. If any null in them can only stand for a missing key, a table wrote them, and all nulls are removed."""
    return tuple(without_nulls(tools)) if any(map(_is_padded, tools)) else tuple(tools)


def turns_without_padding(turns: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the turns without null arguments that stand for missing ones. A null that the tool's description allows is kept."""
    calls = list(_calls(turns))
    if not any(None in arguments.values() for _, arguments in calls):
        return list(turns)
    properties = {called_name(tool): _properties(tool) for tool in tools}
    is_shared = _have_one_set_of_keys(calls)

    def cleaned(name: str, arguments: Any) -> Any:
        if not isinstance(arguments, Mapping):
            return arguments
        known = properties.get(name)
        kept = {
            key: value
            for key, value in arguments.items()
            if value is not None or (not is_shared if known is None else key in known and _allows_null(known[key]))
        }
        return kept if len(kept) == len(arguments) else {key: without_nulls(value) for key, value in kept.items()}

    return [with_arguments(turn, cleaned) for turn in turns]


def _is_padded(value: Any) -> bool:
    """Whether a tool's description contains a null where JSON Schema does not allow one."""
    if isinstance(value, Mapping):
        return any(item is None and key not in _MAY_BE_NULL for key, item in value.items()) or any(
            map(_is_padded, value.values())
        )
    return isinstance(value, list | tuple) and any(map(_is_padded, value))


def _calls(turns: Iterable[Message]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and arguments of each call whose arguments are an object."""
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            function = call.get("function")
            arguments = (function if isinstance(function, Mapping) else call).get("arguments")
            if isinstance(arguments, Mapping):
                yield called_name(call), arguments


def _have_one_set_of_keys(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Whether calls of different tools all have the same argument names, as in a table; then undescribed tools lose nulls too."""
    return len({name for name, _ in calls}) > 1 and len({frozenset(arguments) for _, arguments in calls}) == 1


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The parameters of a tool with their schemas; None if the description does not list them."""
    function = tool.get("function")
    parameters = (function if isinstance(function, Mapping) else tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else None


def _allows_null(schema: Any) -> bool:
    """Whether a JSON schema allows null as a value; true if the schema does not state a type."""
    if not isinstance(schema, Mapping):
        return True
    written = (schema.get(keyword) for keyword in ("anyOf", "oneOf"))
    choices = [choice for some in written if isinstance(some, list) for choice in some]
    if choices:
        return any(map(_allows_null, choices))
    types = schema.get("type")
    named = types if isinstance(types, list) else [types]
    return bool(schema.get("nullable")) or types is None or "null" in named
