"""JSON Lines -> records, one line at a time. In: a file and its format. Out: records, and for each line that is none, why.

Called by prepare.py. A wrong line never ends the reading, so that a user sees all kinds of mistakes at once. Keys beyond those of
the format are allowed and ignored, since data sets commonly carry ids and sources.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from finetune_job.api.data import DataFormat

KEYS: Mapping[DataFormat, tuple[str, ...]] = {
    DataFormat.PROMPT_COMPLETION: ("prompt", "completion"),
    DataFormat.TEXT: ("text",),
}
"""Keys of a record."""

MAY_BE_EMPTY = frozenset({"prompt"})
"""An empty prompt asks for text from nothing, which is sensible; an empty completion or text teaches nothing."""


@dataclass(frozen=True)
class Record:
    """One record. A text is a completion without a prompt."""

    line: int
    """Counted from 1."""
    prompt: str
    completion: str


@dataclass(frozen=True)
class RecordProblem:
    """Why a line is not a record."""

    line: int
    key: str
    """Empty where the whole line is wrong."""
    value: str
    reason: str
    fix: str


def read_records(path: Path, data_format: DataFormat) -> Iterator[Record | RecordProblem]:
    """Every non-blank line as a record or a problem. Raises OSError as the file system does."""
    with path.open("rb") as file:
        for line, encoded in enumerate(file, start=1):
            if encoded.strip():
                yield _parsed(line, encoded, data_format)


def _parsed(line: int, encoded: bytes, data_format: DataFormat) -> Record | RecordProblem:
    try:
        text = encoded.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        return RecordProblem(line, "", _shown(encoded), f"is not UTF-8 ({error.reason})", "save the file as UTF-8")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return RecordProblem(
            line, "", _shown(text), f"is not JSON ({error})", f"write one JSON object per line: {_example(data_format)}"
        )
    if not isinstance(value, dict):
        return RecordProblem(line, "", _shown(text), f"is a JSON {_kind(value)}, not an object", f"write {_example(data_format)}")
    texts = []
    for key in KEYS[data_format]:
        problem = _problem(line, key, value, data_format)
        if problem:
            return problem
        texts.append(value[key])
    return Record(line, "" if len(texts) == 1 else texts[0], texts[-1])


def _problem(line: int, key: str, record: Mapping[str, Any], data_format: DataFormat) -> RecordProblem | None:
    if key not in record:
        return RecordProblem(line, key, f"keys {sorted(record)}", "is missing", _missing_key_fix(key, record, data_format))
    value = record[key]
    if not isinstance(value, str):
        return RecordProblem(
            line, key, _shown(json.dumps(value)), f"is a {_kind(value)}, not a text", f"write {_example(data_format)}"
        )
    if not value.strip() and key not in MAY_BE_EMPTY:
        return RecordProblem(line, key, repr(value), "is empty, so there is nothing to learn", "remove the record or fill it in")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return RecordProblem(line, key, _shown(ascii(value)), f"is not valid Unicode ({error.reason})", "remove the lone surrogate")
    return None


def _missing_key_fix(key: str, record: Mapping[str, Any], data_format: DataFormat) -> str:
    for other, keys in KEYS.items():
        if other is not data_format and all(name in record for name in keys):
            return f"set spec.data.format: {other.value}, which is what the record looks like"
    near = difflib.get_close_matches(key, [name for name in record if name not in KEYS[data_format]], n=1)
    if near:
        return f"rename {near[0]!r} to {key!r}"
    if "messages" in record:
        return f"render the chat with the model's template first and write {_example(data_format)}"
    return f"write {_example(data_format)}"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _example(data_format: DataFormat) -> str:
    return json.dumps(dict.fromkeys(KEYS[data_format], "..."))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "text", list: "list", dict: "object"}
    return kinds[type(value)]


def _shown(text: str | bytes) -> str:
    shown = text.decode(errors="replace") if isinstance(text, bytes) else text
    shown = shown.strip()
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
