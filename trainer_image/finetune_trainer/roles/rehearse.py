"""`python -m finetune_trainer.roles.rehearse`: imports torch and its libraries once; its forks check the model and rehearse the
job.

So torch leaves memory with this process, and is imported once. The process begins with preflight and imports while files and
tokenizer are checked; the rehearsal runs while the data is prepared. It never computes itself, so that it has a single thread
whenever it forks.

Standard input: the plan. Standard output: one JSON object per line: `{"finding": ...}`, `{"checked": ...}` and `{"stage": ...}`
as they come and `{"report": ...}` last. Output of libraries goes to standard error. Called by preflight, and by finetune_cli.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from pydantic import BaseModel, TypeAdapter

from finetune_job.finding import Finding
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.added_tokens import BaseOrder, with_trained_rows
from finetune_trainer.context import RunContext
from finetune_trainer.files import TEMPORARY_MARK, link_root, temporary_beside
from finetune_trainer.inspection.report import RehearsalReport, Verdict
from finetune_trainer.preflight.added_tokens import make_base
from finetune_trainer.preflight.model_process import ANSWER_BYTES as CHECK_BYTES
from finetune_trainer.preflight.model_process import Checked, ModelCheckError, check_within_bounds, checked
from finetune_trainer.processes.child import (
    Child,
    ChildEnd,
    Exceeded,
    encode_answer,
    fork_answering,
    parse_answer,
    start_answering,
    wait_for_answer,
    wait_for_ends,
    wait_for_line,
)
from finetune_trainer.processes.sandbox import WALL_SECONDS
from finetune_trainer.processes.start import (
    NO_ADVICE,
    compile_conversions,
    die_with,
    end,
    keep_bitsandbytes_out,
    preload,
    start_no_threads,
)
from finetune_trainer.rehearsal.verdicts import not_done_finding

log = logging.getLogger(__name__)
SECONDS = 600.0
"""Time bound of the rehearsal on the clock, so that a pod without processor time ends, too."""
PROCESSOR_SECONDS = 110.0
"""Bound of the rehearsal's processor time, which two ranks on two processors use in less than a minute."""
ENDING_SECONDS = 3.0
"""Additional time in which it may end its children."""
MEMORY_BYTES = 3 << 30
ANSWER_BYTES = (2 * CHECK_BYTES) + (4 << 20)
"""Bound of all its lines together: the findings about the model as a text within a line, and a report of some KB."""
NAME = "rehearsal"
"""Name of the temporary directory on the workspace."""
CHECK, REHEARSE = b"c", b"r"
"""Commands of preflight, in this order."""
DEVICES = "CUDA_VISIBLE_DEVICES"
_REMOVAL_SECONDS = 5.0
"""Time in which ranks of an ended rehearsal stop writing."""


class _CheckEnd(BaseModel):
    """How the process that checks the model ended, as a line of the answer."""

    code: int
    exceeded: Exceeded | None
    answer: str


class _AnswerLine(BaseModel):
    """A line of the answer, with the parts that preflight needs."""

    checked: _CheckEnd | None = None
    report: RehearsalReport | None = None


_LINE = TypeAdapter(_AnswerLine)


class ModelProcess:
    """This program as a child process of preflight. As a context manager it is killed at the end, and leaves nothing on the
    workspace.
    """

    def __init__(self, context: RunContext) -> None:
        self._context, self._began = context, time.monotonic()
        workspace = context.workspace.root
        self._scratch = temporary_beside(workspace / NAME)
        self._stack = ExitStack()
        self.is_rehearsing = False
        """Whether the rehearsal was begun."""
        reading, self._commands = os.pipe()
        self._stack.callback(os.close, self._commands)
        try:
            self._child = self._start(reading)
        except BaseException:
            self._stack.close()
            raise
        finally:
            os.close(reading)
        self._stack.callback(lambda: _remove(self._scratch))
        self._stack.enter_context(self._child)

    def _start(self, commands: int) -> Child:
        environment = {name: value for name, value in os.environ.items() if name != NO_ADVICE}
        command = [sys.executable, "-m", __spec__.name, "--parent", str(os.getpid()), "--model", str(self._context.base_model)]
        command += ["--scratch", str(self._scratch), "--commands", str(commands)]
        if DEVICES in environment:
            command += ["--devices", environment[DEVICES]]
        given = self._context.plan.model_dump_json().encode()
        return start_answering(command, environment | on_cpu(), given, ANSWER_BYTES, pass_fds=(commands,))

    def check(self) -> Checked:
        """Check the model as `check_model` does. Raises ModelCheckError if the process fails."""
        self._tell(CHECK)
        line = wait_for_line(self._child, time.monotonic() + WALL_SECONDS)
        directory = self._context.base_model
        if isinstance(line, ChildEnd):
            return checked(line, directory)
        try:
            check_end = parse_answer(line, _LINE).checked
        except ValueError:
            check_end = None
        if check_end is None:
            return checked(ChildEnd(0, line), directory)
        return checked(ChildEnd(check_end.code, check_end.answer.encode(), check_end.exceeded), directory)

    def begin_rehearsal(self) -> None:
        """Start the rehearsal, which runs on its own."""
        self._began, self.is_rehearsing = time.monotonic(), True
        workspace = self._context.workspace.root
        workspace.mkdir(parents=True, exist_ok=True)
        for leftover in workspace.glob(f"{NAME}{TEMPORARY_MARK}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._scratch.mkdir()
        self._tell(REHEARSE)

    def rehearsal(self) -> RehearsalReport:
        """Wait for the end of the process; returns the rehearsal's verdict."""
        deadline = self._began + SECONDS + ENDING_SECONDS
        ended = next(end[1] for end in wait_for_ends([self._child], deadline) if end is not None)
        self.close()
        return self._report(ended)

    def close(self) -> None:
        """End the process, unless it has ended."""
        self._stack.close()

    def _tell(self, command: bytes) -> None:
        with suppress(BrokenPipeError):  # the next read reports how it ended
            os.write(self._commands, command)

    def _report(self, ended: ChildEnd) -> RehearsalReport:
        if ended.exceeded is not None:
            return self._not_finished(f"it {ended.exceeded.value}")
        for line in reversed(ended.answer.splitlines()):
            try:
                answer = parse_answer(line, _LINE)
            except ValueError:
                break
            if answer.report is not None:
                return answer.report
        return self._not_finished(f"its process ended with status {ended.code}; its log says why")

    def _not_finished(self, reason: str) -> RehearsalReport:
        seconds = round(time.monotonic() - self._began, 1)
        return RehearsalReport(verdict=Verdict.NOT_DONE, seconds=seconds, findings=(not_done_finding(reason, self._scratch),))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _remove(scratch: Path) -> None:
    """Remove the directory, also what ranks still write that end with their parent."""
    deadline = time.monotonic() + _REMOVAL_SECONDS
    shutil.rmtree(scratch, ignore_errors=True)
    while scratch.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        shutil.rmtree(scratch, ignore_errors=True)


def on_cpu() -> dict[str, str]:
    """Environment variables of the process: no accelerator, and one thread for each rank."""
    return {DEVICES: "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(argv: list[str] | None = None) -> int:
    """Do what the arguments ask for; returns 0 if everything was answered."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.roles.rehearse", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process to die with")
    parser.add_argument("--model", type=Path, required=True, help="directory of the base model")
    parser.add_argument("--scratch", type=Path, required=True, help="empty directory; made where it does not exist")
    parser.add_argument("--seconds", type=float, help="for all of it by the clock; unset: a bound of processor time")
    parser.add_argument("--check-model", action="store_true", help="first look at the model, as preflight does")
    parser.add_argument("--commands", type=int, help="descriptor from which preflight's commands are read")
    parser.add_argument("--devices", help=f"{DEVICES} for the look at the model; the rehearsal has none")
    arguments = parser.parse_args(argv)
    die_with(arguments.parent)
    start_no_threads()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        plan = RunPlan.model_validate_json(sys.stdin.buffer.read())
        model, scratch = arguments.model.absolute(), arguments.scratch.absolute()
        order = _Order(plan, model, scratch, answer)
        if arguments.commands is not None:
            _obey(order, arguments.commands, arguments.devices)
        elif (accepted := _accepted(order) if arguments.check_model else order) is not None:
            _rehearse(accepted, started, arguments.seconds)
    return 0


@dataclass(frozen=True)
class _Order:
    """The task of this process."""

    plan: RunPlan
    model: Path
    scratch: Path
    answer: IO[str]


LIBRARIES = ("finetune_trainer.rehearsal.run", "finetune_trainer.roles.merge")
"""Modules that the model's check and the rehearsal need."""


def import_libraries(plan: RunPlan) -> None:
    """Import the libraries, and compute once what every forked process would compute again."""
    keep_bitsandbytes_out(plan)
    preload(*LIBRARIES)
    compile_conversions()


def _obey(order: _Order, commands: int, devices: str | None) -> None:
    """Obey preflight's commands until it closes their descriptor. devices: for the check of the model."""
    import_libraries(order.plan)
    while command := os.read(commands, 1):
        if command == CHECK:
            ended = _look(order, (order.answer.fileno(), commands), {DEVICES: devices})
            check_end = _CheckEnd(code=ended.code, exceeded=ended.exceeded, answer=ended.answer.decode(errors="replace"))
            _write_line(order.answer, checked=check_end.model_dump(mode="json"))
            order = _with_batches(order, ended)
        elif command == REHEARSE:
            _rehearse(order, time.monotonic(), None)
            return


def _with_batches(order: _Order, ended: ChildEnd) -> _Order:
    """The order with the plan's choices for the checked model."""
    try:
        structure = checked(ended, order.model)[0]
    except ModelCheckError:
        return order
    return order if structure is None else replace(order, plan=order.plan.with_choices(structure.batches))


def _look(order: _Order, private: Sequence[int], variables: Mapping[str, str | None]) -> ChildEnd:
    """Check the model in a bounded fork; returns how the fork ended.

    private: descriptors of this process, closed in the fork because a model may take it over. variables: of the fork's
    environment.
    """

    def work() -> bytes:
        for descriptor in private:
            os.close(descriptor)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        return check_within_bounds(order.plan, order.model)

    return wait_for_answer(fork_answering(work, CHECK_BYTES), WALL_SECONDS)


def _rehearse(order: _Order, began: float, seconds: float | None) -> None:
    """Rehearse the job. began: on the monotonic clock. seconds: bound on the clock; None: a bound of processor time."""
    import_libraries(order.plan)
    from finetune_trainer.processes.forked import ResourceBounds, used_processor_seconds
    from finetune_trainer.rehearsal.run import rehearse
    from finetune_trainer.roles.merge import merge

    order.scratch.mkdir(parents=True, exist_ok=True)
    bounds = ResourceBounds(
        began + (seconds or SECONDS),
        MEMORY_BYTES,
        # The check of the model does not count.
        used_processor_seconds() + PROCESSOR_SECONDS if seconds is None else math.inf,
        began,
    )
    report = rehearse(
        order.plan,
        order.model,
        order.scratch,
        bounds,
        merge=merge,
        on_stage=lambda stage: _write_line(order.answer, stage=stage.model_dump(mode="json")),
    )
    _write_line(order.answer, report=report.model_dump(mode="json"))


def _accepted(order: _Order) -> _Order | None:
    """The order to rehearse; None if preflight would refuse files, structure or settings, whose findings are then written."""
    from finetune_trainer.inspection.model_files import inspect_model_files

    files = inspect_model_files(order.model, order.plan.model.name)
    findings = list(files.findings)
    if files.digest and order.plan.model.added_tokens:
        order, new_findings = _with_added_tokens(order)
        findings += new_findings
    if files.digest and not findings:
        import_libraries(order.plan)
        # In a fork, because this process must not compute with torch before it forks for the rehearsal.
        structure, new_findings = checked(_look(order, (order.answer.fileno(),), {}), order.model)
        findings += new_findings
        if structure is not None:
            order = replace(order, plan=order.plan.with_choices(structure.batches))
    for finding in findings:
        _write_line(order.answer, finding=finding.model_dump(mode="json"))
    return None if any(finding.severity == "error" for finding in findings) else order


def _with_added_tokens(order: _Order) -> tuple[_Order, list[Finding]]:
    """The order with a base that has the job's tokens, which is removed with the rehearsal's directory, and the findings."""
    target = order.scratch / "base-with-added-tokens"
    wanted = BaseOrder.of(
        order.plan,
        base=order.model,
        root=link_root(order.model),
        target=target,
        record=target.with_suffix(".json"),
    )
    findings, added = make_base(wanted)
    return (order if added is None else replace(order, plan=with_trained_rows(order.plan, added), model=target)), findings


def _write_line(answer: IO[str], **values: Any) -> None:
    answer.write(encode_answer(values).decode() + "\n")
    answer.flush()


if __name__ == "__main__":
    end(main())
