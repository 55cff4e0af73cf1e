"""Tasks and answers arrive as they were sent, and an answer that no worker makes is refused."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.plan.mapping import MappingPlan
from finetune_job.plan.run_plan import DataPlan
from finetune_trainer.data.file_parts import FilePart, PartResult, PartSettings, PartTask
from finetune_trainer.data.messages import (
    MAX_ANSWER_BYTES,
    WorkerError,
    failure_line,
    read_answer,
    read_task,
    result_line,
    task_line,
)
from finetune_trainer.data.records import RecordProblem, count_left_out, count_unread
from finetune_trainer.files import SpecialFileError

FILE = Path(os.fsdecode(b"/claims/data/tr\xe4in.jsonl"))
"""Its name is not UTF-8."""
PLAN = DataPlan(
    train=(),
    validation=None,
    format=DataFormat.CHAT,
    loss_on=LossOn.ASSISTANT,
    max_sequence_length=4096,
    packing=True,
    chat_template="{{ '\u00e9' }}\n",
    mapping=MappingPlan(prompt="\u00e9", roles={"gpt": "assistant"}),
)
SETTINGS = PartSettings(PLAN, (2, 7))


PROBLEM = {"line": 1, "key": "", "value": "", "reason": "", "fix": "", "unit": "line"}


def found() -> PartResult:
    result = PartResult(
        num_records=9,
        num_documents=5,
        num_dropped=1,
        shortest_dropped=5000,
        num_tokens=77,
        num_supervised_tokens=33,
        longest_document=40,
        largest_token_id=31_999,
        num_unknown_tokens=6,
        lengths={8: 3, 64: 2},
    )
    result.found_problem(RecordProblem(3, "messages[1].role", "\u00e9", "is missing", "write one", "row", FILE))
    result.found_problem(RecordProblem(4, "messages[2].role", "", "is missing", "write one", "row", FILE))
    result.found_problem(RecordProblem(5, "", "x", "is not JSON", "write JSON", file=FILE))
    count_left_out(result.left_out, (RecordProblem(6, "tools", "", "is left out", "use another template", file=FILE),))
    count_unread(result.unread, ["history", "x" * 200])
    return result


@pytest.mark.parametrize("span", [None, (0, 4 << 20)])
@pytest.mark.parametrize("result", [None, Path("/claims/part-1")])
def test_a_task_arrives_as_it_was(span: tuple[int, int] | None, result: Path | None) -> None:
    task = PartTask(FilePart(2, FILE, span, 123), SETTINGS, result)
    line = task_line(task)
    assert line.count(b"\n") == 1
    assert read_task(line) == task
    assert read_task(task_line(replace(task, settings=replace(SETTINGS, stop_ids=())))).settings.stop_ids == ()


def test_a_result_arrives_as_it_was() -> None:
    line = result_line(found())
    assert line.count(b"\n") == 1
    read = read_answer(line, FILE)
    assert read == found()
    assert list(read.problems) == list(found().problems)
    assert {problem.file for problem, _ in read.problems.values()} == {FILE}


def test_the_changes_of_a_fix_arrive_unless_they_are_long() -> None:
    result = PartResult()
    changes = {"spec.data.mapping.prompt": "q"}
    result.found_problem(RecordProblem(1, "a", "", "r", "f", file=FILE, changes=changes, are_preferences=True))
    result.found_problem(RecordProblem(2, "b", "", "r", "f", file=FILE, changes={"spec.data.mapping.prompt": "q" * 257}))
    read = read_answer(result_line(result), FILE)
    assert [(problem.changes, problem.are_preferences) for problem, _ in read.problems.values()] == [(changes, True), ({}, False)]


def test_a_template_without_end_arrives() -> None:
    result = PartResult()
    result.found_endless(RecordProblem(4, "template", "", "takes too long", "another", file=FILE))
    assert read_answer(result_line(result), FILE).template_is_endless


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file", str(FILE)),
        PermissionError(errno.EACCES, "Permission denied", None),
        SpecialFileError(FILE),
        OSError("a library without a number"),
    ],
)
def test_an_error_of_the_file_system_keeps_its_kind(error: OSError) -> None:
    with pytest.raises(OSError) as raised:
        read_answer(failure_line(error), FILE)
    for arrived in (read_answer(result_line(PartResult(unreadable=error)), FILE).unreadable, raised.value):
        assert arrived is not None
        assert type(arrived) is type(error)
        assert str(arrived) == str(error)
        assert (arrived.errno, arrived.strerror, arrived.filename) == (error.errno, error.strerror, error.filename)


def test_a_lack_of_memory_and_any_other_error_arrive() -> None:
    with pytest.raises(MemoryError, match="too much"):
        read_answer(failure_line(MemoryError("too much")), FILE)
    with pytest.raises(WorkerError, match="no such luck") as raised:
        read_answer(failure_line(ValueError("no such luck" * 100_000)), FILE)
    assert len(str(raised.value)) < 20_100


def test_answers_stay_below_the_bound_however_long_the_users_texts_are() -> None:
    result = PartResult()
    for number in range(500):
        text = f"{number}" + "\ud800" * 1_000_000
        result.found_problem(RecordProblem(number, text, text[:80], "is wrong", text, file=FILE))
    line = result_line(result)
    assert len(line) < MAX_ANSWER_BYTES
    assert len(read_answer(line, FILE).problems) == 100


@pytest.mark.parametrize(
    "change",
    [
        {"num_records": -1},
        {"num_documents": 1 << 60},
        {"num_tokens": 1.5},
        {"largest_token_id": 1 << 31},
        {"lengths": {"8": -1}},
        {"lengths": {str(number): 1 for number in range(100)}},
        {"problems": {"0": [{"line": 1}, 1]}},
        {"problems": {"0": [PROBLEM | {"unit": "page"}, 1]}},
        {"problems": {"0": [PROBLEM, -1]}},
        {"problems": {"a": 1}},
        {"unreadable": "[Errno 2]"},
        {"template_is_endless": "perhaps"},
        {"more": 1},
    ],
)
def test_a_result_that_no_worker_makes_is_refused(change: dict[str, Any]) -> None:
    answer = json.loads(result_line(PartResult()))
    assert read_answer(json.dumps(answer).encode(), FILE) == PartResult()
    with pytest.raises(WorkerError, match="something other than a result"):
        read_answer(json.dumps(answer | {"result": answer["result"] | change}).encode(), FILE)


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"\x80\x04.", b"[" * 100_000, b"{}", b"null", b"[]"),
        b'{"result": null, "error": {"kind": "other", "number": 1, "text": "", "file": null}}',
    ],
)
def test_a_line_that_is_not_an_answer_is_refused(line: bytes) -> None:
    with pytest.raises(WorkerError, match="something other than a result"):
        read_answer(line, FILE)
