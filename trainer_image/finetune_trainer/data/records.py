"""What a record is, and whether a value read from a file is one. In: mappings. Out: records, or why they are none.

Called by the readers of each kind of file (read_json.py, read_tables.py). Keys beyond those of the
format are allowed and ignored, since data sets commonly carry ids and sources. What depends on the model's chat template or on
lossOn is judged later, in chat.py.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_job.api.inputs import DataFormat

KEYS: Mapping[DataFormat, tuple[str, ...]] = {
    DataFormat.CHAT: ("messages",),
    DataFormat.PROMPT_COMPLETION: ("prompt", "completion"),
    DataFormat.TEXT: ("text",),
}
"""Keys that a record must have."""
TOOLS = "tools"
"""Key that a chat may have."""
MAY_BE_EMPTY = frozenset({"prompt"})
"""Learning to begin from nothing is sensible; an empty completion or text teaches nothing."""
ASSISTANT = "assistant"
"""Role whose turns are learnt; transformers' templates know it by this name."""
MAX_RECORD_BYTES = 64 * 2**20
"""Longest record. Beyond any context length, and what bounds a reader's memory where a file has no record separators."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """One record. A text is a completion without a prompt; of a chat, prompt and completion are empty."""

    line: int
    """Counted from 1: line of JSON Lines and CSV, position in a JSON list, row of Parquet; see RecordProblem.unit."""
    prompt: str
    completion: str
    messages: tuple[Message, ...] = ()
    """Turns of a chat, `role` and `content` (None next to tool_calls) always present; empty in other formats."""
    tools: tuple[Mapping[str, Any], ...] = ()
    unit: str = field(default="line", compare=False)
    """As in RecordProblem."""
    file: Path | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RecordProblem:
    """Why something in a file is not a record that can be learnt from."""

    line: int
    key: str
    """Empty where the whole record is wrong."""
    value: str
    reason: str
    fix: str
    unit: str = "line"
    """What `line` counts: "line", "record" (position in a JSON list) or "row" (Parquet)."""
    file: Path | None = field(default=None, compare=False)

    @property
    def kind(self) -> tuple[str, str]:
        """What problems that are one mistake to the user have in common: the key, in whichever turn of a chat, and the fix."""
        return re.sub(r"\[\d+\]", "[]", self.key), self.fix


@dataclass(frozen=True)
class RecordPosition:
    """Where in a file something was read."""

    file: Path
    line: int
    unit: str = "line"

    def problem(self, key: str, value: str | bytes, reason: str, fix: str) -> RecordProblem:
        return RecordProblem(self.line, key, shown(value), reason, fix, self.unit, self.file)


def record_of(place: RecordPosition, value: Any, data_format: DataFormat) -> Record | RecordProblem:
    """`value`, as JSON knows it, as a record."""
    if not isinstance(value, dict):
        reason = f"is a JSON {kind(value)}, not an object"
        return place.problem("", json.dumps(value), reason, f"write {example(data_format)}")
    for key in KEYS[data_format]:
        if key not in value:
            return missing_key(place, key, value, data_format)
    if data_format is DataFormat.CHAT:
        return _chat(place, value)
    texts = []
    for key in KEYS[data_format]:
        problem = _text_problem(place, key, value[key], data_format)
        if problem is not None:
            return problem
        texts.append(value[key])
    return Record(place.line, "" if len(texts) == 1 else texts[0], texts[-1], unit=place.unit, file=place.file)


def called_name(call: Mapping[str, Any]) -> str:
    """Name of the tool in an element of `tool_calls` or of `tools`; empty where it names none in a way that templates know."""
    function = call.get("function")
    name = (function if isinstance(function, Mapping) else call).get("name")
    return name.strip() if isinstance(name, str) else ""


def missing_key(place: RecordPosition, key: str, names: Mapping[str, Any], data_format: DataFormat) -> RecordProblem:
    """A record, or a file with columns `names`, that lacks `key`."""
    return place.problem(key, f"keys {sorted(names)}", "is missing", _missing_key_fix(key, names, data_format))


def example(data_format: DataFormat) -> str:
    """A record as it should look."""
    if data_format is DataFormat.CHAT:
        return '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
    return json.dumps(dict.fromkeys(KEYS[data_format], "..."))


def kind(value: Any) -> str:
    """What JSON calls the type of `value`."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "text", list: "list", dict: "object"}
    return kinds.get(type(value), type(value).__name__)


def shown(text: str | bytes) -> str:
    """The beginning of `text`, fit for a message."""
    beginning = text[:400].decode(errors="replace") if isinstance(text, bytes) else text[:400]
    beginning = beginning.strip().encode(errors="replace").decode()
    return beginning if len(beginning) <= 80 else f"{beginning[:77]}..."


def _text_problem(place: RecordPosition, key: str, value: Any, data_format: DataFormat) -> RecordProblem | None:
    if not isinstance(value, str):
        fix = f"write {example(data_format)}"
        if isinstance(value, list) and value and all(isinstance(turn, dict) and "role" in turn for turn in value):
            fix = f"join {' and '.join(KEYS[data_format])} into one list, 'messages', and set spec.data.format: Chat"
            if data_format is DataFormat.PROMPT_COMPLETION:
                fix += " and spec.data.lossOn: Completion"
        return place.problem(key, _as_json(value), f"is a {kind(value)}, not a text", fix)
    if not value.strip() and key not in MAY_BE_EMPTY:
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


def _chat(place: RecordPosition, value: Mapping[str, Any]) -> Record | RecordProblem:
    messages = value["messages"]
    write = f"write {example(DataFormat.CHAT)}"
    if not isinstance(messages, list):
        return place.problem("messages", _as_json(messages), f"is a {kind(messages)}, not a list", write)
    if not messages:
        return place.problem("messages", "[]", "is empty, so there is nothing to learn", "remove the record or fill it in")
    turns = []
    for number, message in enumerate(messages):
        turn = _turn(place, f"messages[{number}]", message, write)
        if isinstance(turn, RecordProblem):
            return turn
        turns.append(turn)
    written = value.get(TOOLS)
    tools = written
    if isinstance(written, str):  # how Parquet and many data sets hold them, since tools share no columns
        try:
            tools = json.loads(written) if written.strip() else None
        except ValueError as error:
            return place.problem(TOOLS, written, f"is a text but not JSON ({error})", "write a list of tool descriptions")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return place.problem(
            TOOLS, _as_json(tools), "is not a list of objects", "write a list of tool descriptions, or remove it"
        )
    for text in _texts([turns, tools]):
        problem = _unicode_problem(place, "messages", text)
        if problem is not None:
            return problem
    return Record(place.line, "", "", tuple(turns), tuple(tools or ()), place.unit, place.file)


def _turn(place: RecordPosition, key: str, message: Any, write: str) -> Message | RecordProblem:
    if not isinstance(message, dict):
        return place.problem(key, _as_json(message), f"is a {kind(message)}, not an object", write)
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role is None:
        fix = "rename 'from' to 'role' and 'value' to 'content'" if "from" in message else write
        return place.problem(f"{key}.role", f"keys {sorted(message)}", "is missing", fix)
    if not isinstance(role, str) or not role.strip():
        return place.problem(f"{key}.role", _as_json(role), "is not the name of a role", "write system, user, assistant or tool")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        return place.problem(
            f"{key}.tool_calls", _as_json(calls), "is not a list of objects", "write a list of calls, or remove it"
        )
    # Programs write null, or an empty list of calls, where a turn has none, and templates ask only whether there is a key.
    written = {name: value for name, value in message.items() if value is not None and (calls or name != "tool_calls")}
    if content is None:
        if calls:
            return {**written, "content": None}
        reason = "is null, which only a turn with tool_calls may be" if "content" in message else "is missing"
        return place.problem(f"{key}.content", f"keys {sorted(message)}", reason, write)
    if not isinstance(content, str):
        reason = f"is a {kind(content)}, not a text"
        return place.problem(f"{key}.content", _as_json(content), reason, "write the content as one text")
    if role == ASSISTANT and not content.strip() and not calls and not message.get("reasoning_content"):
        return place.problem(
            f"{key}.content", repr(content), "is empty, so there is nothing to learn", "remove the turn or fill it in"
        )
    return written


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _missing_key_fix(key: str, record: Mapping[str, Any], data_format: DataFormat) -> str:
    for other, keys in KEYS.items():
        if other is not data_format and all(name in record for name in keys):
            return f"set spec.data.format: {other.value}, which is what the record looks like"
    near = difflib.get_close_matches(key, [name for name in record if name not in KEYS[data_format]], n=1)
    if near:
        return f"rename {near[0]!r} to {key!r}"
    if data_format is DataFormat.CHAT and "conversations" in record:
        return "rename 'conversations' to 'messages'"
    return f"write {example(data_format)}"


def _as_json(value: Any) -> str:
    return json.dumps(value, default=repr)
