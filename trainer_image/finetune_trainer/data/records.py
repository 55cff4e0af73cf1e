"""What a record is, what is said of something that is none, and the words that both have in common.

What a file holds becomes one in parse.py; what depends on the model's chat template or on lossOn is judged later, in chat.py.
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
"""Keys that a record of a format has, if they have no other names."""
TOOLS = "tools"
"""Key that a chat may have."""
ASSISTANT = "assistant"
"""Role whose turns are learnt; transformers' templates know it by this name."""
ROLES = frozenset({"system", "developer", "user", ASSISTANT, "tool"})
"""Roles that chat templates know."""
SYSTEM_ROLES = frozenset({"system", "developer"})
WEIGHT_UNIT = 1_000_000
"""Weights of data sets count to a millionth, so that their arithmetic is exact in 64 bits: indices below 9e10 times weights up to
100. Here, and not in packing.py, because what is said of the first records does without numpy."""
PART_SEPARATOR = "\n"
"""Between the text parts of one content; servers of models of text alone join them with it, too."""
PREFERENCES = ("chosen", "rejected")
"""Keys of a pair of answers of which one is preferred."""
LABEL = "label"
"""Key that says whether the answer of a prompt is desired."""
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
    keys: tuple[str, ...] = field(default=(), compare=False)
    """All that it has in its file, those that are not read among them."""


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
    changes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The fix as changes of the manifest, new value by path, if it is one."""
    are_preferences: bool = False
    """The record is a pair of answers of which one is preferred."""

    @property
    def kind(self) -> tuple[str, str]:
        """What problems that are one mistake to the user have in common: the key, in whichever turn of a chat, and the fix."""
        return re.sub(r"\[\d+\]", "[]", self.key), self.fix


@dataclass(frozen=True)
class Suggestion:
    """What to write instead."""

    fix: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """As in RecordProblem."""


@dataclass(frozen=True)
class RecordPosition:
    """Where in a file something was read."""

    file: Path
    line: int
    unit: str = "line"

    def problem(self, key: str, value: str | bytes, reason: str, fix: str | Suggestion) -> RecordProblem:
        suggestion = Suggestion(fix) if isinstance(fix, str) else fix
        return RecordProblem(
            self.line, key, shown(value), reason, suggestion.fix, self.unit, self.file, changes=suggestion.changes
        )


def is_pair_of_turns(prompt: Any, completion: Any) -> bool:
    """Whether the two sides make a chat: turns on both, or on one and a text on the other, which is one turn of its side."""
    sides = (prompt, completion)
    return any(isinstance(side, list) for side in sides) and all(isinstance(side, list | str) for side in sides)


def called_name(call: Mapping[str, Any]) -> str:
    """Name of the tool in an element of `tool_calls` or of `tools`; empty where it names none in a way that templates know."""
    function = call.get("function")
    name = (function if isinstance(function, Mapping) else call).get("name")
    return name.strip() if isinstance(name, str) else ""


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


def as_json(value: Any) -> str:
    return json.dumps(value, default=repr)
