"""Records, the problems of what is not a record, and the texts that both share.

parse.py makes records from what a file holds. chat.py later judges what depends on the model's chat template or on lossOn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_job.api.inputs import DataFormat

KEYS: Mapping[DataFormat, tuple[str, ...]] = {
    DataFormat.CHAT: ("messages",),
    DataFormat.PROMPT_COMPLETION: ("prompt", "completion"),
    DataFormat.TEXT: ("text",),
}
"""Keys of a record of each format, unless the mapping names others."""
TOOLS = "tools"
"""Optional key of a chat."""
ASSISTANT = "assistant"
"""Role whose turns are learnt; transformers' templates know it by this name."""
ROLES = frozenset({"system", "developer", "user", ASSISTANT, "tool"})
"""Roles that chat templates know."""
SYSTEM_ROLES = frozenset({"system", "developer"})
WEIGHT_UNIT = 1_000_000
"""Weights of data sets are multiples of a millionth, so that their arithmetic is exact in 64 bits: indices below 9e10 times
weights up to 100. It stands here and not in packing.py, because looking at the first records must not import numpy.
"""
PART_SEPARATOR = "\n"
"""Separator of the text parts of one content; servers of text-only models join them with it, too."""
PREFERENCES = ("chosen", "rejected")
"""Keys of a pair of answers, of which one is preferred."""
LABEL = "label"
"""Key that says whether the answer of a prompt is desired."""
MAX_RECORD_BYTES = 64 * 2**20
"""Longest record. It is beyond any context length, and bounds a reader's memory if a file has no record separators."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """One record. A text is a completion without a prompt. In a chat, prompt and completion are empty."""

    line: int
    """Counted from 1: line of JSON Lines and CSV, position in a JSON list, row of Parquet; see RecordProblem.unit."""
    prompt: str
    completion: str
    messages: tuple[Message, ...] = ()
    """Turns of a chat, `role` and `content` (None next to tool_calls) always present; empty in other formats."""
    tools: tuple[Mapping[str, Any], ...] = ()
    unit: str = field(default="line", compare=False)
    """Unit of `line`, as in RecordProblem."""
    file: Path | None = field(default=None, compare=False)
    keys: tuple[str, ...] = field(default=(), compare=False)
    """All keys in its file, including those that are not read."""


@dataclass(frozen=True)
class RecordProblem:
    """The reason why something in a file is not a usable record."""

    line: int
    key: str
    """Empty if the whole record is wrong."""
    value: str
    reason: str
    fix: str
    unit: str = "line"
    """Unit of `line`: "line", "record" (position in a JSON list) or "row" (Parquet)."""
    file: Path | None = field(default=None, compare=False)
    changes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The fix as changes of the manifest (path -> new value), if there is one."""
    are_preferences: bool = False
    """The record is a pair of answers of which one is preferred."""

    @property
    def kind(self) -> tuple[str, str]:
        """Key and fix, which identify problems that are one mistake to the user; the number of a chat's turn is left out."""
        return re.sub(r"\[\d+\]", "[]", self.key), self.fix


@dataclass(frozen=True)
class Suggestion:
    """A proposed fix."""

    fix: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """The fix as changes of the manifest, as in RecordProblem."""


@dataclass(frozen=True)
class RecordPosition:
    """The place in a file at which something was read."""

    file: Path
    line: int
    unit: str = "line"

    def problem(self, key: str, value: str | bytes, reason: str, fix: str | Suggestion) -> RecordProblem:
        suggestion = Suggestion(fix) if isinstance(fix, str) else fix
        return RecordProblem(
            self.line, key, shown(value), reason, suggestion.fix, self.unit, self.file, changes=suggestion.changes
        )


def is_pair_of_turns(prompt: Any, completion: Any) -> bool:
    """Whether the two sides make a chat: both are lists of turns, or one is, and the other is a text, which is one turn."""
    sides = (prompt, completion)
    return any(isinstance(side, list) for side in sides) and all(isinstance(side, list | str) for side in sides)


def called_name(call: Mapping[str, Any]) -> str:
    """Name of the tool in an element of `tool_calls` or of `tools`; empty if it has no name in a form that templates know."""
    function = call.get("function")
    name = (function if isinstance(function, Mapping) else call).get("name")
    return name.strip() if isinstance(name, str) else ""


def example(data_format: DataFormat) -> str:
    """A valid record, for messages."""
    if data_format is DataFormat.CHAT:
        return '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
    return json.dumps(dict.fromkeys(KEYS[data_format], "..."))


def kind(value: Any) -> str:
    """Name of the JSON type of `value`."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "text", list: "list", dict: "object"}
    return kinds.get(type(value), type(value).__name__)


def shown(text: str | bytes) -> str:
    """The beginning of `text`, made fit for a message."""
    beginning = text[:400].decode(errors="replace") if isinstance(text, bytes) else text[:400]
    beginning = beginning.strip().encode(errors="replace").decode()
    return beginning if len(beginning) <= 80 else f"{beginning[:77]}..."


def as_json(value: Any) -> str:
    return json.dumps(value, default=repr)
