"""Ends every role and every rank with a report on the workspace, an envelope for the kubelet, and an exit code."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from finetune_job.failures import EXIT_CODES, FailureClass, Outcome, TerminationReport
from finetune_trainer.context import RunContext
from finetune_trainer.errors import TrainerError, classify
from finetune_trainer.files import write_durably

log = logging.getLogger(__name__)


def failure_report(
    error: BaseException,
    role: str,
    attempt: int,
    rank: int | None = None,
    node_rank: int | None = None,
    *,
    finished_steps: int | None = None,
) -> TerminationReport:
    """Return the report of an exception. The report's step is the exception's own step or, if it has none, `finished_steps`."""
    failure, hint = classify(error)
    return TerminationReport(
        role=role,
        attempt=attempt,
        outcome=Outcome.FAILED,
        failure=failure,
        message=str(error) or type(error).__name__,
        hint=hint,
        rank=rank,
        node_rank=node_rank,
        step=error.step if isinstance(error, TrainerError) and error.step is not None else finished_steps,
        exception="".join(traceback.format_exception(error)),
        time=time.time(),
    )


def exit_code(report: TerminationReport) -> int:
    """Return the exit code for a report: 0 for success, otherwise the code of the failure class."""
    if report.outcome is Outcome.SUCCEEDED:
        return 0
    return EXIT_CODES.get(report.failure or FailureClass.INTERNAL, EXIT_CODES[FailureClass.INTERNAL])


def run_role(
    role: str,
    attempt: int,
    body: Callable[[], TerminationReport],
    termination_log: Path,
    context: Callable[[], RunContext | None],
    *,
    node_rank: int = 0,
) -> int:
    """Run `body`, report how it ended, and return the exit code.

    context: called after `body`; returns None if the plan was refused, in which case the report goes only to the termination log.
    """
    try:
        report = body()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        log.exception("%s failed", role)
        report = failure_report(error, role, attempt, node_rank=node_rank)
    known = context()
    if known is not None:
        report = _keep_whole(report, known, role, node_rank)
    try:
        termination_log.write_text(report.envelope())
    except OSError:
        log.exception("the termination log %s could not be written", termination_log)
    return exit_code(report)


def _keep_whole(report: TerminationReport, context: RunContext, role: str, node_rank: int) -> TerminationReport:
    """Write the whole report to the workspace. Returns the report with its path, which is empty if writing failed."""
    path = context.workspace.reports(role, context.attempt) / f"node-{node_rank}.json"
    relative = path.relative_to(context.claims_root / context.plan.workspace.claim)
    report = report.model_copy(update={"report_path": str(relative)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, report.model_dump_json(indent=2).encode())
    except OSError:
        # A full or missing claim must not hide the reason why the role ended.
        log.exception("the report could not be kept at %s", path)
        return report.model_copy(update={"report_path": ""})
    return report
