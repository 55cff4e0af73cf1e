"""Runs the roles of a plan one after another, and retries each role within the same limits as the operator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.launch import Interruption, RoleArguments, launch
from finetune_cli.local.rank_zero import read_progress
from finetune_cli.local.role_output import RoleOutput, SaidLine
from finetune_cli.local.run_directory import RunDirectory, RunRecord, write_record
from finetune_job.api.status import Restarts
from finetune_job.failures import MOST_RESTARTS_IN_POD, FailureClass, Outcome, TerminationReport
from finetune_job.layout import WorkspaceLayout
from finetune_job.names import Role
from finetune_job.plan.run_plan import RunPlan
from finetune_job.progress import Progress
from finetune_operator.decide.failures.restart_policy import (
    RestartDecision,
    counters_after,
    pause_seconds,
    restart_decision,
    with_new_row,
    with_progress,
)


def roles_of(plan: RunPlan) -> tuple[Role, ...]:
    """Return the roles that this plan needs, in order. Sources on claims need no fetch, and results on a claim no publication."""
    fetch = () if plan.fetch is None else (Role.FETCH,)
    publish = () if plan.publish is None else (Role.PUBLISH,)
    return (*fetch, Role.PREFLIGHT, Role.TRAIN, Role.MERGE, *publish)


class RunListener(Protocol):
    """Listens to the events of a run."""

    def started(self, role: Role, attempt: int, output: Path) -> None: ...

    def progressed(self, progress: Progress) -> None: ...

    def said(self, line: SaidLine) -> None: ...

    def ended(self, report: TerminationReport, seconds: float) -> None: ...

    def restarting(self, report: TerminationReport, pause_seconds: float) -> None: ...


@dataclass(frozen=True)
class NextStep:
    """Describes what happens after a role has ended."""

    record: RunRecord
    again_after_seconds: float | None = None
    """Pause before the same role is retried; None: it is not retried."""
    exit_code: ExitCode | None = None
    """Exit code, if the run ends here."""


def next_step(
    record: RunRecord,
    report: TerminationReport,
    role: Role,
    max_restarts: int,
    *,
    interrupted: bool,
    now: datetime,
    checkpoint_step: int | None = None,
) -> NextStep:
    """Decide what happens after a role has ended at `now`. `checkpoint_step`: the newest step that training has saved."""
    counters = with_progress(record.restarts.get(role, Restarts()), checkpoint_step)
    for restart in report.restarts:
        counters = counters_after(RestartDecision.RESTART_COUNTED, restart.failure, counters, now)
    if report.restarts:
        record = record.model_copy(update={"restarts": {**record.restarts, role: counters}})
    if report.outcome is Outcome.SUCCEEDED:
        return NextStep(
            record.model_copy(update={"finished": [*record.finished, role], "facts": {**record.facts, role: report.facts}})
        )
    if report.outcome is Outcome.REFUSED:
        return NextStep(record, exit_code=ExitCode.REFUSED)
    if interrupted:
        return NextStep(record, exit_code=ExitCode.INTERRUPTED)
    failure = report.failure or FailureClass.UNKNOWN
    decision = restart_decision(failure, counters, max_restarts, now, step=report.step)
    if not decision.restarts:
        return NextStep(record, exit_code=ExitCode.FAILED)
    following = counters_after(decision, failure, counters, now)
    pause = pause_seconds(failure, following, role, record.plan_sha256)
    return NextStep(record.model_copy(update={"restarts": {**record.restarts, role: following}}), again_after_seconds=pause)


def tried_by_hand(record: RunRecord) -> RunRecord:
    """Return the record for a new command. The user has seen the earlier failures, so these neither delay a role nor end the run.

    Restarts that count against `run.maxRestarts` are kept.
    """
    restarts = {role: with_new_row(one) for role, one in record.restarts.items()}
    return record.model_copy(update={"restarts": restarts})


class LocalRun:
    """The work of one command on a job."""

    def __init__(
        self,
        place: RunDirectory,
        plan: RunPlan,
        record: RunRecord,
        lock: int,
        audience: RunListener,
        *,
        ranks: int | None = None,
        until_step: int | None = None,
    ) -> None:
        """`lock`: descriptor that keeps the job locked. `ranks`: number of training ranks; None: the plan's. `until_step`: step
        after which training saves its state and ends.
        """
        self.ranks, self.until_step = ranks, until_step
        self.place, self.plan, self.lock, self.audience = place, plan, lock, audience
        self.record = tried_by_hand(record)
        workspace = plan.workspace
        self.last: TerminationReport | None = None
        """Report of the role that ran last."""
        self._checkpoint_step: int | None = None
        """Step of the newest checkpoint that training has reported."""
        self.workspace = WorkspaceLayout(place.claims / workspace.claim / workspace.path)

    def execute(self, max_restarts: int, interruption: Interruption, roles: Sequence[Role] | None = None) -> ExitCode:
        """Run the roles that have not succeeded yet. `roles`: the roles to consider; None: all that the plan needs."""
        for role in roles_of(self.plan) if roles is None else roles:
            while role not in self.record.finished:
                report = self._attempt(role, interruption, max_restarts)
                step = next_step(
                    self.record,
                    report,
                    role,
                    max_restarts,
                    interrupted=interruption.requested,
                    now=datetime.now(UTC),
                    checkpoint_step=self._checkpoint_step if role is Role.TRAIN else None,
                )
                self._keep(step.record)
                if step.exit_code is not None:
                    return step.exit_code
                if step.again_after_seconds is not None:
                    self.audience.restarting(report, step.again_after_seconds)
                    interruption.pause(step.again_after_seconds)
                if interruption.requested:
                    return ExitCode.INTERRUPTED
        return ExitCode.DONE

    def _attempt(self, role: Role, interruption: Interruption, max_restarts: int) -> TerminationReport:
        attempt = self.record.next_attempt.get(role, 0)
        # The attempt number is recorded as used before anything runs under it, so that two processes never share it.
        self._keep(self.record.model_copy(update={"next_attempt": {**self.record.next_attempt, role: attempt + 1}}))
        output = self.place.output(role, attempt)
        self.audience.started(role, attempt, output)
        heard = RoleOutput(output)
        counted = self.record.restarts.get(role, Restarts()).counted
        started = time.monotonic()
        report = launch(
            RoleArguments(
                role=role,
                attempt=attempt,
                plan=self.place.plan,
                plan_sha256=self.record.plan_sha256,
                claims_root=self.place.claims,
                termination_log=self.place.termination_log(role, attempt),
                lock=self.lock,
                ranks=self.ranks,
                until_step=self.until_step,
                restarts=max(min(MOST_RESTARTS_IN_POD, max_restarts - counted), 0),
            ),
            output,
            interruption,
            lambda: self._look(role, attempt, heard),
        )
        seconds = time.monotonic() - started
        self._keep(
            self.record.model_copy(
                update={"seconds": {**self.record.seconds, role: self.record.seconds.get(role, 0.0) + seconds}}
            )
        )
        self.last = report
        self.audience.ended(report, seconds)
        return report

    def _look(self, role: Role, attempt: int, heard: RoleOutput) -> None:
        for line in heard.new_lines():
            self.audience.said(line)
        progress = read_progress(self.workspace.root, attempt) if role is Role.TRAIN else None
        if progress is not None:
            self._checkpoint_step = progress.checkpoint_step
            self.audience.progressed(progress)

    def _keep(self, record: RunRecord) -> None:
        self.record = record
        write_record(self.place.record, record)
