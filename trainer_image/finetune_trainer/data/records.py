"""Defines records, the problems of values that are not valid records, and texts about both.

parse.py makes records from the content of files. chat.py later checks what depends on the model's chat template or on lossOn.
"""

from __future__ import annotations

import json
import re
import shlex
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field

from finetune_job.api.inputs import DataFormat
from finetune_job.plan.mapping import UNMAPPED, MappingPlan

KEYS: Mapping[DataFormat, tuple[str, ...]] = {
    DataFormat.CHAT: ("messages",),
    DataFormat.PROMPT_COMPLETION: ("prompt", "completion"),
    DataFormat.TEXT: ("text",),
}
"""Format -> keys of a record, unless the mapping names others."""
TOOLS = "tools"
"""Optional key of a chat that describes its tools."""
ASSISTANT = "assistant"
"""Role whose turns are learnt. Chat templates know it by this name."""
ROLES = frozenset({"system", "developer", "user", ASSISTANT, "tool"})
"""Roles that chat templates know."""
WEIGHT_UNIT = 1_000_000
"""Number of units in a weight of 1. Weights are multiples of a millionth, so that arithmetic is exact in 64 bits for indices
below 9e10 and weights up to 100. It is not in packing.py, because code that looks at the first records must not import numpy.
"""
PREFERENCES = ("chosen", "rejected")
"""Keys of the preferred answer and of the other answer in a pair."""
LABEL = "label"
"""Key whose value says whether an answer is desired."""
MAX_RECORD_BYTES = 64 * 2**20
"""Maximum size of a record. It exceeds any context length, and bounds a reader's memory if a file has no record separators."""

Message = Mapping[str, Any]
Unit = Literal["line", "record", "row"]
"""A record's `line` counts lines of JSON Lines, CSV and text, records of a list, or rows of Parquet and Arrow."""


@dataclass(frozen=True)
class Record:
    """One record. A text is stored as a completion without a prompt. In a chat, prompt and completion are empty."""

    line: int
    """Number of the line, record or row, as `unit` says; the first is 1."""
    prompt: str
    completion: str
    messages: tuple[Message, ...] = ()
    """Turns of a chat, each with `role` and `content` (may be None in a turn with tool_calls); empty in other formats."""
    tools: tuple[Mapping[str, Any], ...] = ()
    unit: Unit = field(default="line", compare=False)
    file: Path | None = field(default=None, compare=False)
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """The record's own arguments of the chat template."""
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Keys of the record in its file that are not read but may mean something."""


@dataclass(frozen=True)
class RecordProblem:
    """The reason why something in a file is not a usable record, and where it is."""

    line: int
    key: str
    """Key that has the problem; empty if the whole record has it."""
    value: str
    reason: str
    fix: str
    unit: Unit = "line"
    file: Path | None = field(default=None, compare=False)
    changes: Annotated[Mapping[str, str], Field(max_length=8)] = field(default_factory=dict, compare=False)
    """The fix as changes of the manifest (path -> new value); empty if the manifest cannot fix the problem."""
    are_preferences: bool = False
    """Whether the record is a pair of answers of which one is preferred."""
    is_of_source: bool = False
    """Whether skipping the record would not help, because the file itself is wrong or a key asks for a different training."""

    @property
    def words(self) -> str:
        """Key and reason."""
        return f"key {self.key!r} {self.reason}" if self.key else self.reason

    @property
    def kind(self) -> str:
        """The key without turn numbers, and the fix. Problems of the same kind are one mistake to the user."""
        return re.sub(r"\[\d+\]", "[]", self.key) + "\0" + self.fix


Count = Annotated[int, Field(ge=0, lt=1 << 53)]
CountedProblems = dict[str, tuple[RecordProblem, Count]]
"""Kind of problem -> the first problem of the kind, and the number of such problems."""


def count_problem(problems: CountedProblems, problem: RecordProblem, count: int = 1) -> None:
    """Count `count` problems of the same kind as `problem`, which is the first of them."""
    first, counted = problems.get(problem.kind, (problem, 0))
    problems[problem.kind] = (first, counted + count)


MAX_PLACES, MAX_WORDS = 20, 200
"""Maximum number of invalid records listed per source, and maximum number of characters about each."""
InvalidPlaces = Annotated[list[tuple[Count, Unit, Annotated[str, Field(max_length=MAX_WORDS)]]], Field(max_length=MAX_PLACES)]
"""Line, unit and problem of the first invalid records of a file or of a part of a file."""


def list_place(places: InvalidPlaces, problem: RecordProblem) -> None:
    """Add the record that has the problem to `places`, if it is among the first MAX_PLACES."""
    insort(places, (problem.line, problem.unit, problem.words[:MAX_WORDS]))
    del places[MAX_PLACES:]


def count_left_out(problems: CountedProblems, left_out: Iterable[RecordProblem]) -> None:
    """Count a record with content that is left out, once for each kind of problem."""
    for problem in {problem.kind: problem for problem in reversed(tuple(left_out))}.values():
        count_problem(problems, problem)


MAX_UNREAD, MAX_UNREAD_LENGTH = 64, 128
"""Maximum number of unread keys that are counted, and maximum number of characters kept of each."""
UnreadKeys = Annotated[dict[Annotated[str, Field(max_length=MAX_UNREAD_LENGTH)], Count], Field(max_length=MAX_UNREAD)]
"""Key that is not read but may mean something -> number of records that have it."""


def count_unread(unread: UnreadKeys, keys: Iterable[str], count: int = 1) -> None:
    """Count `count` records with these unread keys."""
    for key in keys:
        name = key[:MAX_UNREAD_LENGTH].encode(errors="backslashreplace").decode()[:MAX_UNREAD_LENGTH]
        if name in unread or len(unread) < MAX_UNREAD:
            unread[name] = unread.get(name, 0) + count


@dataclass(frozen=True)
class Suggestion:
    """A proposed fix."""

    fix: str
    changes: Mapping[str, str] = field(default_factory=dict)
    """The fix as changes of the manifest, as in RecordProblem."""


class RecordRefusedError(Exception):
    """A value of a file is not a usable record."""

    def __init__(self, problem: RecordProblem) -> None:
        super().__init__(problem.reason)
        self.problem = problem


@dataclass(frozen=True)
class RecordPosition:
    """The place in a file from which something was read."""

    file: Path
    line: int
    unit: Unit = "line"

    def refuse(self, key: str, value: str | bytes, reason: str, fix: str | Suggestion, *, is_of_source: bool = False) -> NoReturn:
        """Raise RecordRefusedError with the problem of the value at this place."""
        raise RecordRefusedError(self.problem(key, value, reason, fix, is_of_source=is_of_source))

    def not_utf8(self, key: str, value: bytes) -> RecordProblem:
        """Return the problem that bytes are not UTF-8, and name the encoding that they most likely have."""
        if value.startswith((b"\xff\xfe", b"\xfe\xff")):
            encoding, reason = "UTF-16", "is UTF-16"
        else:
            # Windows-1252 has the letters of Latin-1, and the quotes and dashes that programs on Windows write.
            encoding = "WINDOWS-1252"
            reason = f"is not UTF-8, and most likely Windows-1252 or Latin-1: {shown(value.decode('cp1252', errors='replace'))}"
        file = shlex.quote(self.file.name)
        return self.problem(key, value, reason, f"save the file as UTF-8: iconv -f {encoding} -t UTF-8 {file} > NEW_FILE")

    def problem(
        self, key: str, value: str | bytes, reason: str, fix: str | Suggestion, *, is_of_source: bool = False
    ) -> RecordProblem:
        wanted = Suggestion(fix) if isinstance(fix, str) else fix
        place = (self.unit, self.file, wanted.changes)
        # A bracket mistake spoils only its own line; in formats without lines, it may have swallowed other records.
        is_of_source = is_of_source or (not key and self.unit != "line")
        return RecordProblem(self.line, key, shown(value), reason, wanted.fix, *place, is_of_source=is_of_source)


def is_pair_of_turns(prompt: Any, completion: Any) -> bool:
    """Whether the two sides make a chat: both are lists of turns, or one is a list and the other a string that makes one turn."""
    sides = (prompt, completion)
    return any(isinstance(side, list) for side in sides) and all(isinstance(side, list | str) for side in sides)


def weight_units(weight: float) -> int:
    """Convert the weight of a data set into units; a weight of 1 has `WEIGHT_UNIT` units."""
    return round(weight * WEIGHT_UNIT)


def occurrences(weight: float, indices: Any) -> Any:
    """How often each record with these indices occurs in one pass. indices: a number, or an int64 array."""
    units = weight_units(weight)
    return (indices + 1) * units // WEIGHT_UNIT - indices * units // WEIGHT_UNIT


def called_name(call: Mapping[str, Any]) -> str:
    """Name of the tool in an element of `tool_calls` or `tools`; empty if there is none where templates look for it."""
    function = call.get("function")
    name = (function if isinstance(function, Mapping) else call).get("name")
    return name.strip() if isinstance(name, str) else ""


def with_arguments(message: Message, convert: Callable[[str, Any], Any]) -> Message:
    """Return the message with converted arguments in its tool calls. convert: takes the name of a tool and the arguments."""

    def converted(call: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        function = call.get("function")
        if isinstance(function, Mapping):
            return {**call, "function": converted(function, name)}
        return {**call, "arguments": convert(name, call["arguments"])} if "arguments" in call else call

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [converted(call, called_name(call)) for call in calls]} if calls else message


def example(data_format: DataFormat, mapping: MappingPlan = UNMAPPED) -> str:
    """An example of a valid record to show in messages, with the key names of the mapping."""
    if data_format is DataFormat.CHAT and not mapping.chat_of_pair:
        names = {meant: name for name, meant in reversed((mapping.roles or {}).items())}
        turns = [{mapping.role: names.get(role, role), mapping.content: "..."} for role in ("user", ASSISTANT)]
        return json.dumps({mapping.messages: turns})
    keys = (mapping.text,) if data_format is DataFormat.TEXT else (mapping.prompt, mapping.completion)
    return json.dumps(dict.fromkeys(keys, "..."))


def kind(value: Any) -> str:
    """Name of the JSON type of `value`."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return kinds.get(type(value), type(value).__name__)


def shown(text: str | bytes) -> str:
    """The beginning of `text` in a form that a message can show."""
    beginning = text[:400].decode(errors="replace") if isinstance(text, bytes) else text[:400]
    beginning = beginning.strip().encode(errors="replace").decode()
    return beginning if len(beginning) <= 80 else f"{beginning[:77]}..."


def as_json(value: Any) -> str:
    """The value as JSON, for messages. Only the beginning of bytes is shown, since they may be a picture."""
    return json.dumps(value, default=lambda item: repr(item[:400] if isinstance(item, bytes) else item))
