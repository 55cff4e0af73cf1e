"""Messages between the process that prepares data and its workers: a line of JSON for each task and for each answer.

A record or a tokenizer may have taken over a worker, so each answer is validated before it is used.
"""

from __future__ import annotations

import errno
import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.plan.mapping import MappingPlan
from finetune_trainer.data.file_parts import FilePart, PartResult, PartSettings, PartTask, ProblemKind
from finetune_trainer.data.records import RecordProblem
from finetune_trainer.files import SpecialFileError
from finetune_trainer.processes.child import encode_answer, parse_answer

MAX_ANSWER_BYTES = 4 << 20
"""Bound of a line. The following bounds keep an answer below it, even if each character is escaped."""
MAX_KINDS_SENT = 100
"""Kinds of problems that are sent for one part; a report shows fewer."""
MAX_TEXT = 1000
"""Characters of each text of a problem. Keys in the user's data may have any length."""
MAX_CHANGES = 256
"""Characters of the values of a change of the manifest; a longer change appears only as text in the fix."""
MAX_TRACE = 20_000

_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
_COUNTS = (
    "num_records",
    "num_documents",
    "num_dropped",
    "shortest_dropped",
    "num_tokens",
    "num_supervised_tokens",
    "longest_document",
    "largest_token_id",
    "num_unknown_tokens",
    "lengths",
    "template_is_endless",
)


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Problem(_Message):
    line: int
    key: str
    value: str
    reason: str
    fix: str
    unit: Literal["line", "record", "row"]
    changes: Annotated[dict[str, str], Field(max_length=8)]
    are_preferences: bool
    count: _Count


class _Error(_Message):
    """An OSError, or a MemoryError."""

    kind: Literal["file system", "special file", "memory"]
    number: int | None
    text: str
    file: str | None


class _Result(_Message):
    """A PartResult."""

    num_records: _Count
    num_documents: _Count
    num_dropped: _Count
    shortest_dropped: _Count
    num_tokens: _Count
    num_supervised_tokens: _Count
    longest_document: _Count
    largest_token_id: Annotated[int, Field(ge=-1, lt=1 << 31)]
    num_unknown_tokens: _Count
    lengths: Annotated[dict[_Count, _Count], Field(max_length=64)]
    problems: list[_Problem]
    left_out: list[_Problem]
    unreadable: _Error | None
    template_is_endless: bool


class _Failure(_Message):
    error: _Error | None
    trace: str


_ANSWER: TypeAdapter[_Result | _Failure] = TypeAdapter(_Result | _Failure)


@dataclass(frozen=True)
class WorkerFailure:
    """A worker could not do its task."""

    error: OSError | MemoryError | None
    """The error, if it is of the file system or of memory."""
    trace: str
    """The traceback."""


def task_line(task: PartTask) -> bytes:
    """Encode a task for `read_task`."""
    part = {**asdict(task.part), "path": str(task.part.path)}
    result = None if task.result is None else str(task.result)
    settings = {**asdict(task.settings), "mapping": task.settings.mapping.model_dump(mode="json")}
    return encode_answer({"part": part, "settings": settings, "result": result}) + b"\n"


def read_task(line: bytes) -> PartTask:
    """Decode a line of `task_line`. The process that wrote it is trusted."""
    message = json.loads(line)
    part, settings = message["part"], message["settings"]
    span = None if part["span"] is None else (part["span"][0], part["span"][1])
    return PartTask(
        part=FilePart(part["source"], Path(part["path"]), span, part["num_bytes"]),
        settings=PartSettings(
            data_format=DataFormat(settings["data_format"]),
            loss_on=LossOn(settings["loss_on"]),
            max_sequence_length=settings["max_sequence_length"],
            chat_template=settings["chat_template"],
            mapping=MappingPlan.model_validate(settings["mapping"]),
            stop_ids=tuple(settings["stop_ids"]),
        ),
        result=None if message["result"] is None else Path(message["result"]),
    )


def result_line(result: PartResult) -> bytes:
    """Encode a result for `read_answer`."""
    fields = {name: getattr(result, name) for name in _COUNTS}
    fields |= {"problems": _problem_fields(result.problems), "left_out": _problem_fields(result.left_out)}
    fields["unreadable"] = None if result.unreadable is None else _error_fields(result.unreadable)
    return encode_answer(fields) + b"\n"


def failure_line(error: Exception) -> bytes:
    """Encode the exception of a worker for `read_answer`."""
    known = _error_fields(error) if isinstance(error, OSError | MemoryError) else None
    return encode_answer({"error": known, "trace": "".join(traceback.format_exception(error))[-MAX_TRACE:]}) + b"\n"


def read_answer(line: bytes, file: Path) -> PartResult | WorkerFailure:
    """Decode a line of `result_line` or `failure_line`. Raises ValueError for anything else.

    file: the file that the task was about.
    """
    answer = parse_answer(line, _ANSWER)
    if isinstance(answer, _Failure):
        return WorkerFailure(None if answer.error is None else _error(answer.error), answer.trace)
    result = PartResult(**{name: getattr(answer, name) for name in _COUNTS})
    result.problems, result.left_out = _problems(answer.problems, file), _problems(answer.left_out, file)
    unreadable = None if answer.unreadable is None else _error(answer.unreadable)
    result.unreadable = unreadable if isinstance(unreadable, OSError) else None
    return result


def _problem_fields(problems: Mapping[ProblemKind, tuple[RecordProblem, int]]) -> list[dict[str, object]]:
    encoded: list[dict[str, object]] = []
    for problem, count in list(problems.values())[:MAX_KINDS_SENT]:
        texts = {name: getattr(problem, name)[:MAX_TEXT] for name in ("key", "value", "reason", "fix")}
        is_short = sum(len(str(value)) for value in problem.changes.values()) <= MAX_CHANGES
        changes = dict(problem.changes) if is_short else {}
        fields = {"line": problem.line, **texts, "unit": problem.unit, "are_preferences": problem.are_preferences}
        encoded.append({**fields, "changes": changes, "count": count})
    return encoded


def _problems(answers: list[_Problem], file: Path) -> dict[ProblemKind, tuple[RecordProblem, int]]:
    problems = {}
    for answer in answers:
        problem = RecordProblem(**answer.model_dump(exclude={"count"}), file=file)
        problems[problem.kind] = (problem, answer.count)
    return problems


def _error_fields(error: OSError | MemoryError) -> dict[str, object]:
    if isinstance(error, MemoryError):
        return {"kind": "memory", "number": None, "text": str(error)[:MAX_TEXT], "file": None}
    kind = "special file" if isinstance(error, SpecialFileError) else "file system"
    file = None if error.filename is None else str(error.filename)
    return {"kind": kind, "number": error.errno, "text": (error.strerror or str(error))[:MAX_TEXT], "file": file}


def _error(answer: _Error) -> OSError | MemoryError:
    if answer.kind == "memory":
        return MemoryError(answer.text)
    if answer.kind == "special file" and answer.file is not None:
        return SpecialFileError(Path(answer.file))
    if answer.number is None or answer.number not in errno.errorcode:
        return OSError(answer.text)
    return OSError(answer.number, answer.text, answer.file)
