"""Turns a value read from a file into a record, or gives the reason why it is not a record.

Called by the readers of each kind of file (read_json.py, read_tables.py, read_text.py), with the user's names for the parts of a
record (MappingPlan). other_keys.py handles keys that the format does not define. suggestions.py proposes a fix if a record lacks
a key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from finetune_job.api.inputs import RESERVED_ARGUMENTS, DataFormat
from finetune_job.plan.mapping import UNMAPPED, MappingPlan
from finetune_trainer.data.other_keys import (
    TEMPLATE_ARGUMENTS,
    is_empty,
    is_of_interest,
    judged_columns,
    text_of_part,
    unread_keys,
    without_flags,
)
from finetune_trainer.data.padding import tools_without_padding, turns_without_padding
from finetune_trainer.data.records import (
    ASSISTANT,
    PREFERENCES,
    ROLES,
    TOOLS,
    Message,
    Record,
    RecordPosition,
    RecordProblem,
    RecordRefusedError,
    Suggestion,
    as_json,
    example,
    is_pair_of_turns,
    kind,
)
from finetune_trainer.data.suggestions import is_call_role, suggest, suggest_role, suggest_turn

FUNCTIONS, OLDER_CALL = "functions", "function_call"
"""Older names of a chat's `tools` and a turn's `tool_calls`. Templates know only the newer names and silently ignore these."""
OLDER_ROLE, NEWER_ROLE = "function", "tool"
PART_SEPARATOR = "\n"
"""Separator between the text parts of one content. Servers of text-only models also join the parts with it."""


@dataclass(frozen=True)
class _Source:
    """A value from which a record is read."""

    place: RecordPosition
    value: Mapping[str, Any]
    mapping: MappingPlan
    keys: tuple[str, ...]
    """Keys of the required parts: the turns, the text, or question and answer."""

    @property
    def wanted(self) -> str:
        """The fix for a record that is not a chat."""
        return f"write {example(DataFormat.CHAT, self.mapping)}"


def record_of(
    place: RecordPosition,
    value: Any,
    data_format: DataFormat,
    mapping: MappingPlan = UNMAPPED,
    columns_not_read: Collection[str] = (),
) -> Record | RecordProblem:
    """Convert a JSON value into a record.

    mapping: the keys that records use for the parts of the format.
    columns_not_read: columns of a table whose values are not in `value`.
    """
    if not isinstance(value, dict):
        reason = f"is a JSON {kind(value)}, not an object"
        return place.problem("", json.dumps(value), reason, f"write {example(data_format, mapping)}")
    keys, sides = required_keys(data_format, mapping), (mapping.prompt, mapping.completion)
    if data_format is DataFormat.CHAT and keys[0] not in value and is_pair_of_turns(*map(value.get, sides)):
        keys = sides
    for key in keys:
        if key not in value:
            return missing_key(place, key, value, data_format, mapping)
    if mapping.ignored:
        value = {key: item for key, item in value.items() if key in keys or key not in mapping.ignored}
    source = _Source(place, value, mapping, keys)
    try:
        unread = unread_keys(place, value, read_keys(data_format, mapping, value), data_format)
        fields = _READERS[data_format](source)
    except RecordRefusedError as error:
        return error.problem
    except RecursionError:
        return place.problem("", f"keys {sorted(value)}", "is nested too deeply", f"write {example(data_format, mapping)}")
    unread += tuple(key for key in columns_not_read if is_of_interest(key) and key not in mapping.ignored)
    return Record(line=place.line, unit=place.unit, file=place.file, unread=unread, **fields)


def required_keys(data_format: DataFormat, mapping: MappingPlan) -> tuple[str, ...]:
    """Keys that a record must have, under the names that the mapping gives them."""
    if data_format is DataFormat.TEXT:
        return (mapping.text,)
    if data_format is DataFormat.PROMPT_COMPLETION or mapping.chat_of_pair:
        return mapping.prompt, mapping.completion
    return (mapping.messages,)


def read_keys(data_format: DataFormat, mapping: MappingPlan, names: Collection[str]) -> list[str]:
    """The keys or columns among `names` from which a record is made; empty if a required one is missing."""
    wanted = required_keys(data_format, mapping)
    if data_format is DataFormat.CHAT and wanted[0] not in names and not mapping.chat_of_pair:
        wanted = (mapping.prompt, mapping.completion)
    if any(name not in names for name in wanted):
        return []
    optional = {mapping.input} if data_format is not DataFormat.TEXT else set()
    if data_format is DataFormat.CHAT:
        optional |= {
            TOOLS,
            FUNCTIONS,
            TEMPLATE_ARGUMENTS,
            mapping.system,
            *([mapping.history] if mapping.prompt in wanted else []),
        }
    others = {name for name in optional if name is not None and name in names} - {*wanted, *mapping.ignored}
    return [*wanted, *sorted(others)]


def columns_to_read(data_format: DataFormat, mapping: MappingPlan, names: Collection[str]) -> list[str]:
    """The columns of `read_keys`, and those whose values decide whether a record is refused."""
    read = read_keys(data_format, mapping, names)
    return [*read, *(name for name in judged_columns(names, data_format, mapping) if name not in read)] if read else []


def missing_key(
    place: RecordPosition, key: str, names: Mapping[str, Any], data_format: DataFormat, mapping: MappingPlan = UNMAPPED
) -> RecordProblem:
    """The problem of a record, or of a file with columns `names`, that lacks `key`."""
    problem = place.problem(key, f"keys {sorted(names)}", "is missing", suggest(key, names, data_format, mapping))
    if all(name in names for name in PREFERENCES):
        reason = "is missing: these are pairs of preferences, and this product does not train on preferences"
        return replace(problem, reason=reason, are_preferences=True, is_of_source=True)
    return problem


def _text(source: _Source) -> dict[str, Any]:
    (key,) = source.keys
    return {"prompt": "", "completion": _checked_text(source.place, key, source.value[key], DataFormat.TEXT)}


def _pair(source: _Source) -> dict[str, Any]:
    texts = [
        _checked_text(source.place, key, source.value[key], may_be_empty=key == source.mapping.prompt) for key in source.keys
    ]
    return {"prompt": _with_input(source, texts[0]) + source.mapping.separator, "completion": texts[1]}


def _with_input(source: _Source, prompt: str) -> str:
    """The prompt, followed by the record's additional input if there is any."""
    mapping = source.mapping
    more = source.value.get(mapping.input) if mapping.input is not None else None
    if more is None:
        return prompt
    _checked_text(source.place, str(mapping.input), more, may_be_empty=True)
    return mapping.separator.join(text for text in (prompt, more) if text.strip()) if more.strip() else prompt


def _checked_text(
    place: RecordPosition,
    key: str,
    value: Any,
    data_format: DataFormat = DataFormat.PROMPT_COMPLETION,
    *,
    may_be_empty: bool = False,
) -> str:
    if not isinstance(value, str):
        fix = Suggestion(f"write {key} as one string")
        if isinstance(value, list) and value and all(isinstance(turn, dict) and "role" in turn for turn in value):
            changes = {"spec.data.format": "Chat"}
            if data_format is DataFormat.PROMPT_COMPLETION:
                changes["spec.data.lossOn"] = "Completion"
            fix = Suggestion(f"set {' and '.join(f'{path}: {word}' for path, word in changes.items())}", changes)
        place.refuse(key, as_json(value), f"is a {kind(value)}, not a string", fix)
    if not value.strip() and not may_be_empty:
        place.refuse(key, repr(value), "is empty, so there is nothing to learn", "remove the record or fill it in")
    _check_unicode(place, key, value)
    return value


def _check_unicode(place: RecordPosition, key: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if "\udc80" <= text[error.start] <= "\udcff":  # stands for a byte that is not UTF-8
            raise RecordRefusedError(place.not_utf8(key, text.encode(errors="surrogateescape"))) from error
        place.refuse(key, ascii(text), f"is not valid Unicode ({error.reason})", "remove the lone surrogate")


def _chat(source: _Source) -> dict[str, Any]:
    turns: list[Message] = []
    for key in source.keys:
        is_text = len(source.keys) > 1 and isinstance(source.value[key], str)
        turns += [_turn_of_side(source, key)] if is_text else _turns(source, key)
    if len(source.keys) > 1:
        turns = [*_history(source), *turns]
    if turns[0]["role"] not in ("system", "developer"):
        turns = [*_system_turn(source), *turns]
    tools, arguments = tools_without_padding(_tools(source)), _template_arguments(source)
    turns = turns_without_padding(turns, tools)
    for text in _texts([turns, tools, arguments]):
        _check_unicode(source.place, source.keys[0], text)
    return {"prompt": "", "completion": "", "messages": tuple(turns), "tools": tools, "template_arguments": arguments}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _turn_of_side(source: _Source, key: str) -> Message:
    """The turn made from a question or an answer that is a string."""
    is_answer, text = key == source.mapping.completion, source.value[key]
    text = _checked_text(source.place, key, text if is_answer else _with_input(source, text))
    return {"role": ASSISTANT if is_answer else "user", "content": text}


def _system_turn(source: _Source) -> list[Message]:
    """The system turn for a chat whose turns include none, taken from the record's own key or else from the manifest."""
    key = source.mapping.system
    own = source.value.get(key) if key is not None else None
    if own is not None and not isinstance(own, str):
        source.place.refuse(str(key), as_json(own), f"is a {kind(own)}, not a string", "write one string, or remove it")
    text = own if own and own.strip() else source.mapping.system_turn
    return [{"role": "system", "content": text}] if text else []


def _history(source: _Source) -> list[Message]:
    """The turns before the question: pairs of question and answer, or turns with roles."""
    key = source.mapping.history
    written = source.value.get(key) if key is not None else None
    earlier = _json_of(written, written)
    if key is None or is_empty(earlier):
        return []
    if isinstance(earlier, list) and all(isinstance(turn, dict) for turn in earlier):
        return _turns(source, key)
    turns: list[Message] = []
    for number, pair in enumerate(earlier if isinstance(earlier, list) else [earlier]):
        place = f"{key}[{number}]"
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            reason = "is not a pair of two strings, a question and its answer"
            source.place.refuse(place, as_json(pair), reason, f'write {key}: [["question", "answer"]]')
        question, answer = pair
        turns += [
            {"role": "user", "content": question},
            {"role": ASSISTANT, "content": _checked_text(source.place, place, answer)},
        ]
    return turns


def _template_arguments(source: _Source) -> Mapping[str, Any]:
    """The record's own arguments of the chat template. A string is read as JSON."""
    written = source.value.get(TEMPLATE_ARGUMENTS)
    arguments = _json_of(written, written)
    if arguments in (None, "", {}, []):
        return {}
    if not isinstance(arguments, dict):
        source.place.refuse(TEMPLATE_ARGUMENTS, as_json(written), f"is a {kind(written)}, not an object", "write an object")
    reserved = sorted(RESERVED_ARGUMENTS.intersection(arguments))
    if reserved:
        reason = "has a name that is reserved for the product's own arguments of the template"
        source.place.refuse(f"{TEMPLATE_ARGUMENTS}.{reserved[0]}", as_json(arguments[reserved[0]]), reason, "remove it")
    try:
        json.dumps(arguments)
    except TypeError as error:  # a table may hold timestamps or bytes
        reason = f"is not JSON ({error})"
        source.place.refuse(TEMPLATE_ARGUMENTS, as_json(arguments), reason, "write strings, numbers or booleans")
    return arguments


def _json_of(text: Any, otherwise: Any) -> Any:
    """The value that a string holds as JSON; `otherwise` if `text` is not such a string."""
    if not isinstance(text, str):
        return otherwise
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def _tools(source: _Source) -> tuple[Mapping[str, Any], ...]:
    written = source.value.get(TOOLS)
    tools = _older_tools(source.value.get(FUNCTIONS)) if written is None else written
    if isinstance(written, str):  # as in Parquet files, where different tools' arguments fit no common columns
        try:
            tools = json.loads(written) if written.strip() else None
        except (ValueError, RecursionError) as error:
            source.place.refuse(TOOLS, written, f"is a string but not JSON ({error})", "write a list of tool descriptions")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        source.place.refuse(TOOLS, as_json(tools), "is not a list of objects", "write a list of tool descriptions, or remove it")
    return tuple(tools or ())


def _older_tools(functions: Any) -> list[dict[str, Any]] | None:
    """The functions in the form of `tools`; None if `functions` holds anything else, since other data may use this key too."""
    functions = _json_of(functions, None) if isinstance(functions, str) else functions
    if not isinstance(functions, list) or not all(map(_is_older_call, functions)):
        return None
    return [{"type": "function", "function": dict(function)} for function in functions]


def _is_older_call(value: Any) -> bool:
    """Whether `value` is a valid call or description of a function: an object with the name of a function."""
    return isinstance(value, dict) and isinstance(value.get("name"), str) and bool(value["name"].strip())


def _older_call(turn: Any) -> Any:
    """The `function_call` of a turn, which may be malformed; None if it is missing, empty or consists of nulls."""
    call = turn.get(OLDER_CALL) if isinstance(turn, dict) else None
    parts = call.values() if isinstance(call, dict) else [call]
    return None if all(part in (None, "", []) for part in parts) else call


def _newer_turn(source: _Source, key: str, turn: Any) -> Any:
    """Convert a turn to the newer form, in a chat that uses the older keys."""
    call = _older_call(turn)
    if call is not None and not _is_older_call(call):
        fix = 'write tool_calls, as in [{"type": "function", "function": {"name": "...", "arguments": {}}}], or remove it'
        source.place.refuse(f"{key}.{OLDER_CALL}", as_json(call), "is not a call of a function", fix)
    if not isinstance(turn, dict):
        return turn
    newer, role_key = {name: value for name, value in turn.items() if name != OLDER_CALL}, source.mapping.role
    if call is not None and not turn.get("tool_calls"):
        newer["tool_calls"] = [{"type": "function", "function": dict(call)}]
    if turn.get(role_key) == OLDER_ROLE and OLDER_ROLE not in (source.mapping.roles or ()):
        newer[role_key] = NEWER_ROLE
    return newer


def _turns(source: _Source, key: str) -> list[Message]:
    """Read the turns under `key`: those of the whole chat, or only of its question, answer or history."""
    # Tables, and Json columns of the datasets library, may hold the turns as a JSON string, which is decoded here.
    messages = _json_of(source.value[key], source.value[key])
    if not isinstance(messages, list):
        source.place.refuse(key, as_json(messages), f"is a {kind(messages)}, not a list", source.wanted)
    if not messages:
        source.place.refuse(key, "[]", "is empty, so there is nothing to learn", "remove the record or fill it in")
    if any(_older_call(turn) is not None for turn in messages):
        messages = [_newer_turn(source, f"{key}[{number}]", turn) for number, turn in enumerate(messages)]
    return [_turn(source, f"{key}[{number}]", message, messages) for number, message in enumerate(messages)]


def _turn(source: _Source, key: str, message: Any, turns: Sequence[Any]) -> Message:
    """Convert `message`, one of `turns`. Keys other than role, content and tool_calls are kept for the template."""
    place, mapping = source.place, source.mapping
    if not isinstance(message, dict):
        place.refuse(key, as_json(message), f"is a {kind(message)}, not an object", source.wanted)
    role, calls = _role(source, f"{key}.{mapping.role}", message, turns), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        place.refuse(f"{key}.tool_calls", as_json(calls), "is not a list of objects", "write a list of calls, or remove it")
    # Programs write null or an empty list if a turn has no calls, but templates only test whether the key exists.
    not_copied = (mapping.role, mapping.content) if calls else (mapping.role, mapping.content, "tool_calls")
    others = {name: value for name, value in message.items() if name not in not_copied}
    others = without_flags(place, key, others, role, mapping)
    return {"role": role, **others, "content": _content(source, f"{key}.{mapping.content}", message, role)}


def _role(source: _Source, key: str, message: Mapping[str, Any], turns: Sequence[Any]) -> str:
    mapping, place = source.mapping, source.place
    role = message.get(mapping.role)
    if role is None:
        place.refuse(key, f"keys {sorted(message)}", "is missing", suggest_turn(message, turns, mapping) or source.wanted)
    if not isinstance(role, str) or not role.strip():
        names = mapping.roles or ("system", "user", ASSISTANT, "tool")
        place.refuse(key, as_json(role), "is not the name of a role", f"write one of {', '.join(names)}")
    if mapping.roles is not None and (role := mapping.roles.get(role, role)) not in ROLES:
        reason = f"{role!r} is not a role of a chat and spec.data.mapping.roles does not name it"
        place.refuse(key, role, reason, suggest_role(role))
    if mapping.roles is None and is_call_role(role):
        reason = "is a call of a tool as a turn of its own, which would not be learnt"
        place.refuse(key, role, reason, suggest_role(role))
    return role


def _content(source: _Source, key: str, message: Mapping[str, Any], role: str) -> str | None:
    """The content as one text; None if the turn only calls tools."""
    place, content, calls = source.place, message.get(source.mapping.content), message.get("tool_calls")
    if content is None:
        if calls:
            return None
        reason = "is null, which only a turn with tool_calls may be" if source.mapping.content in message else "is missing"
        place.refuse(key, f"keys {sorted(message)}", reason, source.wanted)
    if isinstance(content, list):
        texts = [text_of_part(place, f"{key}[{number}]", part, source.mapping) for number, part in enumerate(content)]
        content = PART_SEPARATOR.join(texts)
    if not isinstance(content, str):
        place.refuse(key, as_json(content), f"is a {kind(content)}, not a string", "write the content as one string")
    if role == ASSISTANT and not content.strip() and not calls and not message.get("reasoning_content"):
        place.refuse(key, repr(content), "is empty, so there is nothing to learn", "remove the turn or fill it in")
    return content


_READERS: Mapping[DataFormat, Callable[[_Source], dict[str, Any]]] = {
    DataFormat.CHAT: _chat,
    DataFormat.PROMPT_COMPLETION: _pair,
    DataFormat.TEXT: _text,
}
"""Format -> function that reads the fields of a Record. It raises RecordRefusedError if the value is not a record."""
