"""Messages between the process that prepares data and its workers: one line of JSON for each task and each answer.

A malicious record or tokenizer may control a worker, so each answer is validated before it is used.
"""

from __future__ import annotations

import errno
import json
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from finetune_trainer.data.file_parts import PartResult, PartTask
from finetune_trainer.data.records import CountedProblems
from finetune_trainer.errors import TrainerError
from finetune_trainer.files import SpecialFileError
from finetune_trainer.processes.child import encode_answer, parse_answer

MAX_ANSWER_BYTES = 4 << 20
"""Longest line, in bytes. The limits below keep every answer shorter than this, even if each character is escaped."""
MAX_KINDS_SENT = 100
"""Maximum number of kinds of problems that are sent for one part; a report shows fewer."""
MAX_TEXT = 1000
"""Longest text of a problem, in characters. Keys in the user's data may have any length."""
MAX_CHANGES = 256
"""Maximum total length of a problem's manifest changes, in characters. Longer changes appear only as text in the fix."""
MAX_TRACE = 20_000


class WorkerError(TrainerError):
    """A process that prepares data exited before its work was done."""


@dataclass
class _Error:
    """An OSError or a MemoryError."""

    kind: Literal["file system", "special file", "memory"]
    number: int | None
    text: str
    file: str | None


@dataclass
class _Answer:
    result: PartResult | None
    """The result, or None if the worker could not do its task."""
    error: _Error | None
    """The reason why the part's file is unreadable, or why there is no result."""
    trace: str = ""
    """The traceback if there is no result."""


_TASK, _ANSWER = TypeAdapter(PartTask), TypeAdapter(_Answer)


def task_line(task: PartTask) -> bytes:
    """Encode a task as a line that `read_task` decodes."""
    return encode_answer(_TASK.dump_python(task, mode="json")) + b"\n"


def read_task(line: bytes) -> PartTask:
    """Decode a line of `task_line`. The process that wrote it is trusted."""
    return _TASK.validate_python(json.loads(line))


def result_line(result: PartResult) -> bytes:
    """Encode a result as a line that `read_answer` decodes."""
    error = None if result.unreadable is None else _error_fields(result.unreadable)
    problems, left_out = _shortened(result.problems), _shortened(result.left_out)
    return _line(_Answer(replace(result, problems=problems, left_out=left_out, unreadable=None), error))


def failure_line(error: Exception) -> bytes:
    """Encode the exception of a worker as a line that `read_answer` decodes."""
    known = _error_fields(error) if isinstance(error, OSError | MemoryError) else None
    return _line(_Answer(None, known, "".join(traceback.format_exception(error))[-MAX_TRACE:]))


def read_answer(line: bytes, file: Path) -> PartResult:
    """Decode a line of `result_line` or `failure_line`. file: the file that the task was about.

    Raises the worker's OSError or MemoryError, or WorkerError for any other error of the worker or a line that is not an answer.
    """
    try:
        answer = parse_answer(line, _ANSWER)
    except ValueError as error:
        raise WorkerError("a process that prepares data wrote something other than a result") from error
    cause = None if answer.error is None else _error(answer.error)
    if answer.result is None:
        raise cause or WorkerError(f"a process that prepares data failed:\n{answer.trace}")
    return replace(
        answer.result,
        problems={problem.kind: (replace(problem, file=file), count) for problem, count in answer.result.problems.values()},
        left_out={problem.kind: (replace(problem, file=file), count) for problem, count in answer.result.left_out.values()},
        unreadable=cause if isinstance(cause, OSError) else None,
    )


def _line(answer: _Answer) -> bytes:
    return encode_answer(_ANSWER.dump_python(answer, mode="json")) + b"\n"


def _shortened(problems: CountedProblems) -> CountedProblems:
    """Shorten the texts of problems, and replace the dictionary's long keys (kinds of problems) with numbers."""
    short: CountedProblems = {}
    for number, (problem, count) in enumerate(list(problems.values())[:MAX_KINDS_SENT]):
        texts = {name: getattr(problem, name)[:MAX_TEXT] for name in ("key", "value", "reason", "fix")}
        is_short = sum(len(str(value)) for value in problem.changes.values()) <= MAX_CHANGES
        short[str(number)] = (replace(problem, **texts, changes=problem.changes if is_short else {}, file=None), count)
    return short


def _error_fields(error: OSError | MemoryError) -> _Error:
    if isinstance(error, MemoryError):
        return _Error("memory", None, str(error)[:MAX_TEXT], None)
    file = None if error.filename is None else str(error.filename)
    kind: Literal["special file", "file system"] = "special file" if isinstance(error, SpecialFileError) else "file system"
    return _Error(kind, error.errno, (error.strerror or str(error))[:MAX_TEXT], file)


def _error(answer: _Error) -> OSError | MemoryError:
    if answer.kind == "memory":
        return MemoryError(answer.text)
    if answer.kind == "special file" and answer.file is not None:
        return SpecialFileError(Path(answer.file))
    if answer.number is None or answer.number not in errno.errorcode:
        return OSError(answer.text)
    return OSError(answer.number, answer.text, answer.file)
