"""A value read from a file -> a record, or the reason why it is not a record.

Called by the readers of each kind of file (read_json.py, read_tables.py, read_text.py), with the user's names for the parts of a
record (MappingPlan). Keys beyond those of the format are allowed and ignored, since data sets commonly carry ids and sources.
suggestions.py proposes what to write if a record has other keys.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from finetune_job.api.inputs import DataFormat
from finetune_job.plan.mapping import UNMAPPED, MappingPlan
from finetune_trainer.data.older_calls import CALL, FUNCTIONS, call_of, has_older_calls, is_call, newer_tools, newer_turn
from finetune_trainer.data.records import (
    ASSISTANT,
    LABEL,
    PART_SEPARATOR,
    PREFERENCES,
    ROLES,
    SYSTEM_ROLES,
    TOOLS,
    Message,
    Record,
    RecordPosition,
    RecordProblem,
    Suggestion,
    as_json,
    example,
    is_pair_of_turns,
    kind,
)
from finetune_trainer.data.suggestions import is_call_role, rated_answers, suggest, suggest_role, suggest_roles, suggest_turn


def record_of(
    place: RecordPosition,
    value: Any,
    data_format: DataFormat,
    mapping: MappingPlan = UNMAPPED,
    keys_in_file: tuple[str, ...] = (),
) -> Record | RecordProblem:
    """Convert a JSON value into a record.

    mapping: the names that the records have for the parts of the format. keys_in_file: all keys, if `value` has only some of
    them.
    """
    if not isinstance(value, dict):
        reason = f"is a JSON {kind(value)}, not an object"
        return place.problem("", json.dumps(value), reason, f"write {example(data_format)}")
    keys, all_keys = required_keys(data_format, mapping), keys_in_file or tuple(value)
    sides = (mapping.prompt, mapping.completion)
    if data_format is DataFormat.CHAT and keys[0] not in value and is_pair_of_turns(*map(value.get, sides)):
        keys = sides
    for key in keys:
        if key not in value:
            return missing_key(place, key, value, data_format, mapping)
    if mapping.prompt in keys and _rates_answers(value, mapping):
        return _rated(place, value)
    if data_format is DataFormat.CHAT:
        return _chat(place, value, mapping, keys, all_keys)
    texts = []
    for key in keys:
        problem = _text_problem(place, key, value[key], data_format, may_be_empty=key == mapping.prompt)
        if problem is not None:
            return problem
        texts.append(value[key])
    if data_format is DataFormat.TEXT:
        return Record(place.line, "", texts[0], unit=place.unit, file=place.file, keys=all_keys)
    prompt = _prompt(place, texts[0], value, mapping)
    if isinstance(prompt, RecordProblem):
        return prompt
    return Record(place.line, prompt + mapping.separator, texts[1], unit=place.unit, file=place.file, keys=all_keys)


def required_keys(data_format: DataFormat, mapping: MappingPlan) -> tuple[str, ...]:
    """Keys that a record must have, by the mapping's names."""
    if data_format is DataFormat.TEXT:
        return (mapping.text,)
    if data_format is DataFormat.PROMPT_COMPLETION or mapping.chat_of_pair:
        return mapping.prompt, mapping.completion
    return (mapping.messages,)


def read_keys(data_format: DataFormat, mapping: MappingPlan, names: Collection[str]) -> list[str]:
    """Columns of `names` from which a record is made; empty if a required one is missing."""
    wanted = required_keys(data_format, mapping)
    if data_format is DataFormat.CHAT and wanted[0] not in names and not mapping.chat_of_pair:
        wanted = (mapping.prompt, mapping.completion)
    if any(name not in names for name in wanted):
        return []
    optional = {mapping.input} if data_format is not DataFormat.TEXT else set()
    if data_format is DataFormat.CHAT:
        optional |= {TOOLS, FUNCTIONS, mapping.system}
    return [*wanted, *sorted(name for name in optional if name is not None and name in names and name not in wanted)]


def columns_to_read(data_format: DataFormat, mapping: MappingPlan, names: Collection[str]) -> list[str]:
    """The columns of `read_keys`, and the one that shows whether the answers are rated."""
    read = read_keys(data_format, mapping, names)
    return [*read, LABEL] if mapping.prompt in read and LABEL in names and LABEL not in read else read


def _rates_answers(value: Mapping[str, Any], mapping: MappingPlan) -> bool:
    """Whether the records mark answers as desired or undesired, and no mapping asks for all of them."""
    if (mapping.prompt, mapping.completion, mapping.separator, mapping.chat_of_pair) != ("prompt", "completion", "", False):
        return False
    label = value.get(LABEL)
    return isinstance(label, bool) or (isinstance(label, str) and label.strip().lower() in {"true", "false"})


def _rated(place: RecordPosition, value: Mapping[str, Any]) -> RecordProblem:
    reason = (
        "says whether the answer is desired: these are preferences, on which this product does not train, and it would learn "
        "undesired answers, too"
    )
    return replace(place.problem(LABEL, as_json(value[LABEL]), reason, rated_answers()), are_preferences=True)


def _prompt(place: RecordPosition, prompt: str, value: Mapping[str, Any], mapping: MappingPlan) -> str | RecordProblem:
    """The prompt with its further input."""
    more = value.get(mapping.input) if mapping.input is not None else None
    if more is None:
        return prompt
    problem = _text_problem(place, str(mapping.input), more, DataFormat.PROMPT_COMPLETION, may_be_empty=True)
    if problem is not None:
        return problem
    return mapping.separator.join(text for text in (prompt, more) if text.strip()) if more.strip() else prompt


def missing_key(
    place: RecordPosition, key: str, names: Mapping[str, Any], data_format: DataFormat, mapping: MappingPlan = UNMAPPED
) -> RecordProblem:
    """The problem of a record, or of a file with columns `names`, that lacks `key`."""
    problem = place.problem(key, f"keys {sorted(names)}", "is missing", suggest(key, names, data_format, mapping))
    if all(name in names for name in PREFERENCES):
        reason = "is missing: these are pairs of preferences, and this product does not train on preferences"
        return replace(problem, reason=reason, are_preferences=True)
    return problem


def _text_problem(
    place: RecordPosition, key: str, value: Any, data_format: DataFormat, *, may_be_empty: bool
) -> RecordProblem | None:
    if not isinstance(value, str):
        fix = Suggestion(f"write {example(data_format)}")
        if isinstance(value, list) and value and all(isinstance(turn, dict) and "role" in turn for turn in value):
            is_pair = data_format is DataFormat.PROMPT_COMPLETION
            changes = {"spec.data.format": "Chat"} | ({"spec.data.lossOn": "Completion"} if is_pair else {})
            fix = Suggestion(f"set {' and '.join(f'{path}: {word}' for path, word in changes.items())}", changes)
        return place.problem(key, as_json(value), f"is a {kind(value)}, not a text", fix)
    if not value.strip() and not may_be_empty:
        return place.problem(key, repr(value), "is empty, so there is nothing to learn", "remove the record or fill it in")
    return _unicode_problem(place, key, value)


def _unicode_problem(place: RecordPosition, key: str, text: str) -> RecordProblem | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if "\udc80" <= text[error.start] <= "\udcff":  # how a byte that is not UTF-8 is read
            return place.problem(key, ascii(text), "is not UTF-8", "save the file as UTF-8")
        return place.problem(key, ascii(text), f"is not valid Unicode ({error.reason})", "remove the lone surrogate")
    return None


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


def _chat(
    place: RecordPosition, value: Mapping[str, Any], mapping: MappingPlan, keys: tuple[str, ...], all_keys: tuple[str, ...]
) -> Record | RecordProblem:
    """keys: the key of the turns, or the keys of question and answer."""
    turns: list[Message] = []
    for key in keys:
        is_side = len(keys) > 1
        messages = _turns_at(place, key, value, mapping, is_side=is_side, is_answer=not is_side or key == mapping.completion)
        if isinstance(messages, RecordProblem):
            return messages
        turns += messages
    lead = _system_turn(place, value, mapping, turns)
    if isinstance(lead, RecordProblem):
        return lead
    turns = [*lead, *turns]
    written = value.get(TOOLS)
    tools = newer_tools(value.get(FUNCTIONS)) if written is None else written
    if isinstance(written, str):  # Parquet files and many data sets store tools as text, since tools share no columns
        try:
            tools = json.loads(written) if written.strip() else None
        except (ValueError, RecursionError) as error:
            return place.problem(TOOLS, written, f"is a text but not JSON ({error})", "write a list of tool descriptions")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return place.problem(TOOLS, as_json(tools), "is not a list of objects", "write a list of tool descriptions, or remove it")
    for text in _texts([turns, tools]):
        problem = _unicode_problem(place, keys[0], text)
        if problem is not None:
            return problem
    return Record(place.line, "", "", tuple(turns), tuple(tools or ()), place.unit, place.file, all_keys)


def _turns_at(
    place: RecordPosition, key: str, value: Mapping[str, Any], mapping: MappingPlan, *, is_side: bool, is_answer: bool
) -> list[Message] | RecordProblem:
    """The turns of a chat, or of one side of it, which may be a text."""
    write = f"write {example(DataFormat.CHAT)}"
    messages = value[key]
    if isinstance(messages, str) and is_side:
        text = messages if is_answer else _prompt(place, messages, value, mapping)
        problem = (
            text
            if isinstance(text, RecordProblem)
            else _text_problem(place, key, text, DataFormat.PROMPT_COMPLETION, may_be_empty=False)
        )
        return problem or [{"role": ASSISTANT if is_answer else "user", "content": text}]
    if not isinstance(messages, list):
        return place.problem(key, as_json(messages), f"is a {kind(messages)}, not a list", write)
    if not messages:
        return place.problem(key, "[]", "is empty, so there is nothing to learn", "remove the record or fill it in")
    turns = []
    if has_older_calls(messages):
        wrong = next((number for number, turn in enumerate(messages) if _calls_nothing(turn)), None)
        if wrong is not None:
            fix = 'write tool_calls, as in [{"type": "function", "function": {"name": "...", "arguments": {}}}], or remove it'
            return place.problem(f"{key}[{wrong}].{CALL}", as_json(messages[wrong][CALL]), "is no call of a function", fix)
        messages = [newer_turn(turn, mapping.role, mapping.roles or ()) if isinstance(turn, dict) else turn for turn in messages]
    for number, message in enumerate(messages):
        turn = _turn(place, f"{key}[{number}]", message, messages, mapping)
        if isinstance(turn, RecordProblem):
            return turn
        turns.append(turn)
    return turns


def _calls_nothing(turn: Any) -> bool:
    call = call_of(turn)
    return call is not None and not is_call(call)


def _system_turn(
    place: RecordPosition, value: Mapping[str, Any], mapping: MappingPlan, turns: Sequence[Message]
) -> list[Message] | RecordProblem:
    """The system turn of the record or of the manifest; none if the chat begins with its own."""
    if turns[0]["role"] in SYSTEM_ROLES:
        return []
    own = value.get(mapping.system) if mapping.system is not None else None
    if own is not None and not isinstance(own, str):
        return place.problem(str(mapping.system), as_json(own), f"is a {kind(own)}, not a text", "write one text, or remove it")
    text = own if own and own.strip() else mapping.system_turn
    return [{"role": "system", "content": text}] if text else []


def _turn(place: RecordPosition, key: str, message: Any, turns: Sequence[Any], mapping: MappingPlan) -> Message | RecordProblem:
    """Convert `message`, one of `turns`."""
    write = f"write {example(DataFormat.CHAT)}"
    if not isinstance(message, dict):
        return place.problem(key, as_json(message), f"is a {kind(message)}, not an object", write)
    role, content, calls = message.get(mapping.role), message.get(mapping.content), message.get("tool_calls")
    role_key, content_key = f"{key}.{mapping.role}", f"{key}.{mapping.content}"
    if role is None:
        return place.problem(role_key, f"keys {sorted(message)}", "is missing", suggest_turn(message, turns, mapping) or write)
    if not isinstance(role, str) or not role.strip():
        return place.problem(role_key, as_json(role), "is not the name of a role", "write system, user, assistant or tool")
    if mapping.roles is not None and (role := mapping.roles.get(role, role)) not in ROLES:
        reason = f"{role!r} is not a role of a chat and spec.data.mapping.roles does not name it"
        return place.problem(role_key, role, reason, suggest_role(role))
    if is_call_role(role) and mapping.roles is None:
        reason = "is a call of a tool as a turn of its own, which would not be learnt"
        names = [turn.get(mapping.role) for turn in turns if isinstance(turn, dict)]
        roles = list(dict.fromkeys(each for each in names if isinstance(each, str)))
        return place.problem(role_key, role, reason, suggest_roles(roles) or suggest_role(role))
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        return place.problem(
            f"{key}.tool_calls", as_json(calls), "is not a list of objects", "write a list of calls, or remove it"
        )
    # Programs write null or an empty list if a turn has no calls, and templates only test whether the key exists.
    mapped_keys = (mapping.role, mapping.content)
    written = {name: each for name, each in message.items() if each is not None and (calls or name != "tool_calls")}
    written = {"role": role} | {name: each for name, each in written.items() if name not in mapped_keys}
    if content is None:
        if calls:
            return {**written, "content": None}
        reason = "is null, which only a turn with tool_calls may be" if mapping.content in message else "is missing"
        return place.problem(content_key, f"keys {sorted(message)}", reason, write)
    if isinstance(content, list):
        content = _joined_parts(place, content_key, content)
        if isinstance(content, RecordProblem):
            return content
    if not isinstance(content, str):
        reason = f"is a {kind(content)}, not a text"
        return place.problem(content_key, as_json(content), reason, "write the content as one text")
    if role == ASSISTANT and not content.strip() and not calls and not message.get("reasoning_content"):
        return place.problem(
            content_key, repr(content), "is empty, so there is nothing to learn", "remove the turn or fill it in"
        )
    return {**written, "content": content}


def _joined_parts(place: RecordPosition, key: str, parts: list[Any]) -> str | RecordProblem:
    """The text of a content that is given in parts, all of which must be texts."""
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        part_type = part.get("type", "text") if isinstance(part, dict) else kind(part)
        if part_type != "text" or not isinstance(text, str):
            reason = f"is a part of the type {as_json(part_type)} and not of text, which is all that this product trains on"
            return place.problem(f"{key}[{number}]", as_json(part), reason, "remove the part, or the record")
        texts.append(text)
    return PART_SEPARATOR.join(texts)
