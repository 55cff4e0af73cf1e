"""`python -m finetune_trainer.roles.rehearse`: a process that imports torch and the libraries around it once, and whose forks
look at the model and rehearse the job.

So torch leaves memory with it, and is imported once. It begins with preflight and imports while files and tokenizer are looked
at; the rehearsal runs while the data is prepared. It never computes itself, so that it has a single thread whenever it forks.

Standard input: the plan. Standard output: one JSON object per line: `{"finding": ...}`, `{"checked": ...}` and `{"stage": ...}`
as they come and `{"report": ...}` last. What libraries print goes to standard error. Called by preflight, and by finetune_cli.
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
"""For all of it by the clock, from the word to begin: so that a pod that is starved ends, too."""
PROCESSOR_SECONDS = 110.0
"""For all of it on processors: what two ranks take in less than a minute on two of them, however busy these are."""
ENDING_SECONDS = 3.0
"""What it may take to end its children after that."""
MEMORY_BYTES = 3 << 30
ANSWER_BYTES = (2 * CHECK_BYTES) + (4 << 20)
"""Of all its lines together: what was found of the model as a text within a line, and a report of some KB."""
NAME = "rehearsal"
"""Of the temporary directory on the workspace."""
CHECK, REHEARSE = b"c", b"r"
"""Commands of preflight, in this order."""
DEVICES = "CUDA_VISIBLE_DEVICES"
_REMOVAL_SECONDS = 5.0
"""For ranks of a rehearsal that was ended to write no more."""


class _CheckEnd(BaseModel):
    """How the process that looks at the model ended, as a line says it."""

    code: int
    exceeded: Exceeded | None
    answer: str


class _AnswerLine(BaseModel):
    """A line of the answer, as far as preflight asks for it."""

    checked: _CheckEnd | None = None
    report: RehearsalReport | None = None


_LINE = TypeAdapter(_AnswerLine)


class ModelProcess:
    """This program as a process next to preflight. As a context it is killed at the end, and leaves nothing on the workspace."""

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
        """As `check_model`. Raises ModelCheckError if the process fails."""
        self._tell(CHECK)
        found = wait_for_line(self._child, time.monotonic() + WALL_SECONDS)
        directory = self._context.base_model
        if isinstance(found, ChildEnd):
            return checked(found, directory)
        try:
            said = parse_answer(found, _LINE).checked
        except ValueError:
            said = None
        if said is None:
            return checked(ChildEnd(0, found), directory)
        return checked(ChildEnd(said.code, said.answer.encode(), said.exceeded), directory)

    def begin_rehearsal(self) -> None:
        """Let it rehearse, on its own."""
        self._began, self.is_rehearsing = time.monotonic(), True
        workspace = self._context.workspace.root
        workspace.mkdir(parents=True, exist_ok=True)
        for leftover in workspace.glob(f"{NAME}{TEMPORARY_MARK}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._scratch.mkdir()
        self._tell(REHEARSE)

    def rehearsal(self) -> RehearsalReport:
        """The verdict, when it has one. It has ended then."""
        deadline = self._began + SECONDS + ENDING_SECONDS
        ended = next(found[1] for found in wait_for_ends([self._child], deadline) if found is not None)
        self.close()
        return self._report(ended)

    def close(self) -> None:
        """End it, unless it has ended."""
        self._stack.close()

    def _tell(self, command: bytes) -> None:
        with suppress(BrokenPipeError):  # how it has ended is asked for next
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
    """With what ranks still wrote that end with their parent."""
    deadline = time.monotonic() + _REMOVAL_SECONDS
    shutil.rmtree(scratch, ignore_errors=True)
    while scratch.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        shutil.rmtree(scratch, ignore_errors=True)


def on_cpu() -> dict[str, str]:
    """Variables of the process: no accelerator, and one thread for each rank."""
    return {DEVICES: "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(argv: list[str] | None = None) -> int:
    """0: all was said that was asked for."""
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
    """What this process is for."""

    plan: RunPlan
    model: Path
    scratch: Path
    answer: IO[str]


LIBRARIES = ("finetune_trainer.rehearsal.run", "finetune_trainer.roles.merge")
"""What the model's check and the rehearsal need."""


def import_libraries(plan: RunPlan) -> None:
    """Import them, and make what every one of their processes would make again."""
    keep_bitsandbytes_out(plan)
    preload(*LIBRARIES)
    compile_conversions()


def _obey(order: _Order, commands: int, devices: str | None) -> None:
    """commands: descriptor from which they are read, until preflight closes it. devices: for the look at the model."""
    import_libraries(order.plan)
    while command := os.read(commands, 1):
        if command == CHECK:
            ended = _look(order, (order.answer.fileno(), commands), {DEVICES: devices})
            said = _CheckEnd(code=ended.code, exceeded=ended.exceeded, answer=ended.answer.decode(errors="replace"))
            _write_line(order.answer, checked=said.model_dump(mode="json"))
            order = _with_batches(order, ended)
        elif command == REHEARSE:
            _rehearse(order, time.monotonic(), None)
            return


def _with_batches(order: _Order, ended: ChildEnd) -> _Order:
    """With what was chosen for the model that has been looked at."""
    try:
        structure = checked(ended, order.model)[0]
    except ModelCheckError:
        return order
    return order if structure is None else replace(order, plan=order.plan.with_choices(structure.batches))


def _look(order: _Order, private: Sequence[int], variables: Mapping[str, str | None]) -> ChildEnd:
    """How a fork has ended that looks at the model, within the bounds of a process that lives for nothing else.

    private: descriptors of this process which a model that takes the fork over must not write to. variables: of its environment.
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
    """began: on the monotonic clock. seconds: for all of it by the clock; None: a bound of processor time."""
    import_libraries(order.plan)
    from finetune_trainer.processes.forked import ResourceBounds, used_processor_seconds
    from finetune_trainer.rehearsal.run import rehearse
    from finetune_trainer.roles.merge import merge

    order.scratch.mkdir(parents=True, exist_ok=True)
    bounds = ResourceBounds(
        began + (seconds or SECONDS),
        MEMORY_BYTES,
        # What looking at the model took is not the rehearsal's.
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
    """What is to be rehearsed; None if preflight would refuse files, structure or settings before, as it then says."""
    from finetune_trainer.inspection.model_files import inspect_model_files

    files = inspect_model_files(order.model, order.plan.model.name)
    findings = list(files.findings)
    if files.digest and order.plan.model.added_tokens:
        order, found = _with_added_tokens(order)
        findings += found
    if files.digest and not findings:
        import_libraries(order.plan)
        # In a fork, because this process must not compute with torch before it forks for the rehearsal.
        structure, found = checked(_look(order, (order.answer.fileno(),), {}), order.model)
        findings += found
        if structure is not None:
            order = replace(order, plan=order.plan.with_choices(structure.batches))
    for finding in findings:
        _write_line(order.answer, finding=finding.model_dump(mode="json"))
    return None if any(finding.severity == "error" for finding in findings) else order


def _with_added_tokens(order: _Order) -> tuple[_Order, list[Finding]]:
    """With a base that has the job's tokens, which is gone with all else of the rehearsal."""
    target = order.scratch / "base-with-added-tokens"
    wanted = BaseOrder.of(
        order.plan,
        base=order.model,
        root=link_root(order.model),
        target=target,
        record=target.with_suffix(".json"),
    )
    found, added = make_base(wanted)
    return (order if added is None else replace(order, plan=with_trained_rows(order.plan, added), model=target)), found


def _write_line(answer: IO[str], **values: Any) -> None:
    answer.write(encode_answer(values).decode() + "\n")
    answer.flush()


if __name__ == "__main__":
    end(main())
