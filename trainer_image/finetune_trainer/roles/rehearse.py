"""`python -m finetune_trainer.roles.rehearse`: tries a job on a scaled-down model, in forks of one process.

The process imports torch and other libraries once, and never computes itself, so that it has a single thread whenever it forks.
Preflight runs it while the data is prepared.

Standard input: the plan. Standard output: one JSON object per line, `{"finding": ...}` or `{"stage": ...}` as soon as each is
known and `{"report": ...}` last. Output of libraries goes to standard error. Preflight and finetune_cli run this program.
"""

from __future__ import annotations

import argparse
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, TypeAdapter

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.added_tokens import BaseOrder, with_trained_rows
from finetune_trainer.context import RunContext
from finetune_trainer.files import TEMPORARY_MARK, link_root, temporary_beside
from finetune_trainer.inspection.model_files import inspect_model_files
from finetune_trainer.inspection.report import RehearsalReport, Verdict
from finetune_trainer.preflight.added_tokens import make_base
from finetune_trainer.preflight.model_process import finish_check, start_check, start_module
from finetune_trainer.processes.child import Child, encode_answer, parse_answer, wait_for_answer
from finetune_trainer.processes.start import answer_on_stdout, die_with, end, keep_bitsandbytes_out, preload
from finetune_trainer.rehearsal.verdicts import not_done_finding

SECONDS = 600.0
"""Wall-clock bound of the rehearsal, so that it also ends in a pod that gets no processor time."""
PROCESSOR_SECONDS = 110.0
"""Bound of the rehearsal's processor time, which two ranks on two processors use in less than a minute."""
ENDING_SECONDS = 3.0
"""Additional time that the rehearsal has to kill its children."""
MEMORY_BYTES = 3 << 30
ANSWER_BYTES = 4 << 20
"""Bound of the answer's total size in bytes. A report takes a few KB."""
NAME = "rehearsal"
"""Name of the temporary directory on the workspace."""
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""Environment variables of the process: no accelerator, and one thread for each rank."""
LIBRARIES = ("finetune_trainer.rehearsal.run", "finetune_trainer.roles.merge")
"""Modules that the forked processes need."""
_REMOVAL_SECONDS = 5.0
"""How long to wait, after a rehearsal has ended, for its ranks to stop writing."""


class _AnswerLine(BaseModel):
    """A line of the answer, reduced to what preflight needs."""

    report: RehearsalReport | None = None


_LINE = TypeAdapter(_AnswerLine)


def start_rehearsal(context: RunContext, until_done: ExitStack) -> Callable[[], RehearsalReport]:
    """Start this program for the job, and return a function that waits for its report.

    Closing `until_done` kills the process if it is still running, and removes its files.
    """
    workspace, began = context.workspace.root, time.monotonic()
    workspace.mkdir(parents=True, exist_ok=True)
    for leftover in workspace.glob(f"{NAME}{TEMPORARY_MARK}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = temporary_beside(workspace / NAME)
    scratch.mkdir()
    until_done.callback(_remove, scratch)
    arguments = ("--model", str(context.base_model), "--scratch", str(scratch))
    plan = context.plan.model_dump_json()
    child = start_module(__spec__.name, plan, *arguments, variables=ON_CPU, max_answer_bytes=ANSWER_BYTES)
    until_done.enter_context(child)
    return partial(_report, child, scratch, began)


def _report(child: Child, scratch: Path, began: float) -> RehearsalReport:
    ended = wait_for_answer(child, began + SECONDS + ENDING_SECONDS - time.monotonic())
    reason = f"its process exited with status {ended.code}; its log says why"
    if ended.exceeded is not None:
        reason = f"it {ended.exceeded.value}"
    else:
        try:
            report = parse_answer(ended.answer.rstrip(b"\n").rpartition(b"\n")[2], _LINE).report
        except ValueError:
            report = None
        if report is not None:
            return report
    seconds = round(time.monotonic() - began, 1)
    return RehearsalReport(verdict=Verdict.NOT_DONE, seconds=seconds, findings=(not_done_finding(reason, scratch),))


def _remove(scratch: Path) -> None:
    """Remove the directory, including files that ranks write while they die with their parent."""
    deadline = time.monotonic() + _REMOVAL_SECONDS
    shutil.rmtree(scratch, ignore_errors=True)
    while scratch.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    """Do what the arguments request; returns 0, whatever the verdict."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.roles.rehearse", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process with which this one ends")
    parser.add_argument("--model", type=Path, required=True, help="directory of the base model")
    parser.add_argument("--scratch", type=Path, required=True, help="empty directory; created if it does not exist")
    parser.add_argument("--seconds", type=float, help="wall-clock bound of the rehearsal; unset: a bound of processor time")
    parser.add_argument("--check-model", action="store_true", help="first look at the model, as preflight does")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    with answer_on_stdout() as answer:
        plan = RunPlan.model_validate_json(sys.stdin.buffer.read())
        order = _Order(plan, arguments.model.absolute(), arguments.scratch.absolute(), answer)
        accepted = _accepted(order) if arguments.check_model else order
        if accepted is not None:
            _rehearse(accepted, started, arguments.seconds)
    return 0


@dataclass(frozen=True)
class _Order:
    """The task of this process."""

    plan: RunPlan
    model: Path
    scratch: Path
    answer: BinaryIO

    def write(self, **values: Any) -> None:
        """Write a line of the answer."""
        self.answer.write(encode_answer(values) + b"\n")
        self.answer.flush()


def _import_libraries(plan: RunPlan) -> None:
    keep_bitsandbytes_out(plan)
    preload(*LIBRARIES)


def _rehearse(order: _Order, began: float, seconds: float | None) -> None:
    """Rehearse the job. began: start on the monotonic clock. seconds: wall-clock bound; None: bound the processor time."""
    _import_libraries(order.plan)
    from finetune_trainer.processes.forked import ResourceBounds, used_processor_seconds
    from finetune_trainer.rehearsal.run import rehearse
    from finetune_trainer.roles.merge import merge

    order.scratch.mkdir(parents=True, exist_ok=True)
    # The time of the imports does not count, so the bound is added to the processor time used so far.
    processor_seconds = used_processor_seconds() + PROCESSOR_SECONDS if seconds is None else math.inf
    report = rehearse(
        order.plan,
        order.model,
        order.scratch,
        ResourceBounds(began + (seconds or SECONDS), MEMORY_BYTES, processor_seconds, began),
        merge=merge,
        on_stage=lambda stage: order.write(stage=stage.model_dump(mode="json")),
    )
    order.write(report=report.model_dump(mode="json"))


def _accepted(order: _Order) -> _Order | None:
    """Check the model, write the findings, and return the order to rehearse; None if preflight would refuse the job."""
    files = inspect_model_files(order.model, order.plan.model.name)
    findings = list(files.findings)
    if files.digest and order.plan.model.added_tokens:
        # The base with added tokens is made here only for the rehearsal, and is removed with its directory.
        target = order.scratch / "base-with-added-tokens"
        places = {"base": order.model, "root": link_root(order.model), "target": target, "record": target.with_suffix(".json")}
        new_findings, added = make_base(BaseOrder.of(order.plan, **places))
        findings += new_findings
        if added is not None:
            order = replace(order, plan=with_trained_rows(order.plan, added), model=target)
    if files.digest and not findings:
        child = start_check(order.plan, order.model)
        _import_libraries(order.plan)
        structure, new_findings = finish_check(child, order.model)
        findings += new_findings
        if structure is not None:
            order = replace(order, plan=order.plan.with_choices(structure.batches))
    for finding in findings:
        order.write(finding=finding.model_dump(mode="json"))
    return None if any(finding.severity == "error" for finding in findings) else order


if __name__ == "__main__":
    end(main())
