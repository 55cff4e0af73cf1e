"""The steps that the stages of all roles share: create the Job, wait for it within its deadlines, retry or give up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune_job.api.status import Attempt
from finetune_job.conditions import find_condition
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason
from finetune_operator.decide.failures.classify import Failure
from finetune_operator.decide.failures.job_state import JobState, Pending, State, job_state
from finetune_operator.decide.failures.restart_policy import (
    POLICY,
    RestartDecision,
    counters_after,
    pause_seconds,
    restart_decision,
    row_of,
    with_progress,
)
from finetune_operator.decide.gang.attempts import (
    GangSize,
    closed,
    latest_of,
    newest_checkpoint,
    opened,
    record_of,
    restarts_of,
    with_record,
    with_restarts,
)
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.seen.children_seen import BatchJobView
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.stage import ATTEMPT_FIELD, CONDITION, attempt_of
from finetune_operator.decide.seen.times import moment_after, startup_deadline, timestamp
from finetune_operator.decide.stages.blocked import delete_leftovers, wait_for_refused_write
from finetune_operator.decide.stages.finish import finish_failed
from finetune_operator.decide.stages.stopped import start_next_attempt, stop_role

QUIET_SECONDS = 10.0
"""How long pods may take to start before status reports that they are waiting."""
_WAITING = {
    FailureClass.SOURCE_UNAVAILABLE: Reason.WAITING_FOR_SOURCE,
    FailureClass.DESTINATION_UNAVAILABLE: Reason.WAITING_FOR_DESTINATION,
}


@dataclass(frozen=True)
class RoleStage:
    """The steps that all roles have in common, for one role in one pass."""

    observed: Observed
    result: PassResult
    role: Role
    nodes: int = 1
    """Number of pods of its Job."""
    most_nodes: int | None = None
    """Maximum number of pods that a Job of the role may have; None if all its Jobs have the same number."""
    size: GangSize | None = None
    """Size to record for the attempt; None if the gang is not elastic."""

    @property
    def attempt(self) -> int:
        """Number of the current attempt."""
        return attempt_of(self.observed.job.status, self.role)

    @property
    def record(self) -> Attempt | None:
        """The record of the current attempt in status."""
        return record_of(self.observed.job.status, self.role, self.attempt)

    def job_state(self) -> JobState:
        """The state of the current attempt's Job."""
        before = find_condition(self.observed.job.status.conditions, CONDITION[self.role])
        # The first release kept records of training only. For other roles, the condition shows whether the Job was seen.
        unrecorded = self.role is not Role.TRAIN and latest_of(self.observed.job.status, self.role) is None
        was_seen = self.record is not None or (unrecorded and before is not None and before.reason == Reason.RUNNING)
        return job_state(self.observed, self.role, self.attempt, self.nodes, was_seen=was_seen, now=self.result.now)

    def set_reason(self, reason: Reason, message: str = "") -> None:
        """Set the reason and message of this stage's condition, whose status is Unknown because the stage is not done."""
        self.result.condition(CONDITION[self.role], None, reason, message)

    def drive(
        self,
        build: Callable[[], Mapping[str, Any]],
        succeeded: Callable[[JobState], bool],
        refused: Callable[[Failure], bool] = lambda _failure: False,
    ) -> bool:
        """Handle one pass over the Job of a role that has a single pod.

        Args:
            build: returns the Job to create.
            succeeded: records the result, and returns whether the next stage may begin.
            refused: handles a failure that only a human can fix, and returns whether it did.

        Returns:
            Whether the stage is done.
        """
        current = self.job_state()
        if current.state is State.ABSENT:
            self.create(lambda: [build()])
        elif current.state is State.SUCCEEDED:
            done = succeeded(current)
            if not self.result.has_value("attempts"):
                self.close(AttemptOutcome.SUCCEEDED)
            return done
        elif current.failure is not None:
            if not refused(current.failure):
                self.fail(current.failure, current.batch_job)
        elif current.batch_job is not None:
            self.wait(current, current.batch_job)
        return False

    def create(self, build: Callable[[], list[Mapping[str, Any]]]) -> None:
        """Create the Job of the current attempt, once the pause is over and nothing is left of earlier attempts."""
        if delete_leftovers(self.observed, self.result, self.role):
            return
        if self._pauses() or wait_for_refused_write(self.observed, self.result, CONDITION[self.role]):
            return
        for body in build():
            self.result.create(body)
        if self.observed.refused is None:
            self.set_reason(Reason.WAITING_FOR_PODS, f"Attempt {self.attempt} is being created.")
            self.result.condition(ConditionType.READY, False, Reason.WAITING_FOR_PODS)

    def wait(self, current: JobState, batch_job: BatchJobView) -> None:
        """Report what the Job is doing, and give up on it if its pods have nodes but take too long to start."""
        if current.requeue_at is not None:
            self.result.requeue_at(current.requeue_at)
        if current.state in (State.WAITING, State.QUEUED) and current.pending is not None:
            self._wait_for_pods(current, batch_job, current.pending)
            return
        if self.record is None:
            # A Job that waited in a queue was created long before it started.
            begun = batch_job.start_time or batch_job.created
            pods = self.observed.pods_of(self.role, self.attempt)
            self.result.set(attempts=opened(self.observed.job.status, self.role, self.attempt, begun, pods, size=self.size))
        if current.state is State.RUNNING:
            place = f" on {self.nodes} of {self.most_nodes} nodes" if self.size is not None else ""
            self.set_reason(Reason.RUNNING, f"Attempt {self.attempt} runs{place}.")
            self.result.condition(ConditionType.READY, True, Reason.RUNNING)
        else:
            self.set_reason(Reason.RUNNING, f"Attempt {self.attempt} fails; waiting for the cause.")
            self.result.condition(ConditionType.READY, False, Reason.RUNNING)

    def close(self, outcome: AttemptOutcome, failure: Failure | None = None, *, counted: bool = False) -> None:
        """Record the end of this attempt."""
        status, now = self.observed.job.status, self.result.now
        attempts = closed(status, self.role, self.attempt, outcome, now, failure=failure, counted=counted, size=self.size)
        self.result.set(attempts=attempts)

    def resize(self, nodes: int, why: str, batch_job: BatchJobView) -> None:
        """Continue with a larger or smaller gang, which is not a failure. Deleting the Job sends SIGTERM, so the gang saves."""
        status, resized, now = self.observed.job.status, AttemptOutcome.RESIZED, self.result.now
        attempts = closed(status, self.role, self.attempt, resized, now, message=why, size=self.size)
        self.result.set(attempts=attempts, **{ATTEMPT_FIELD[self.role]: self.attempt + 1}, gang_nodes=nodes)
        message = f"{why} Attempt {self.attempt + 1} has {nodes} of {self.most_nodes} nodes."
        self.set_reason(Reason.RESIZING, message)
        self.result.condition(ConditionType.READY, False, Reason.RESIZING, message)
        self.result.emit("Normal", Reason.RESIZING, message)
        self.result.delete(batch_job)

    def fail(self, failure: Failure, batch_job: BatchJobView | None, nodes: int | None = None) -> None:
        """Restart or give up, by the policy. The new attempt number and the evidence are written before the old Job is deleted.

        nodes: number of nodes of the next attempt, if the gang is elastic.
        """
        status, spec = self.observed.job.status, self.observed.job.spec
        if spec is None:
            return
        restarts = with_progress(restarts_of(status, self.role), newest_checkpoint(status, self.role))
        decision = restart_decision(failure.failure, restarts, spec.run.max_restarts, self.result.now, step=failure.step)
        following = counters_after(decision, failure.failure, restarts, self.result.now)
        pause = pause_seconds(failure.failure, following, self.role, self.observed.job.uid)
        counted = decision is RestartDecision.RESTART_COUNTED
        self.close(AttemptOutcome.FAILED, failure, counted=counted)
        if not decision.restarts:
            if failure.failure is FailureClass.VERIFICATION_FAILED:
                finish_failed(self.observed, self.result, Reason.VERIFICATION_FAILED, failure.text)
            elif self.role is Role.TRAIN and not POLICY[failure.failure].outside:
                reason = Reason.RESTARTS_EXHAUSTED if decision is RestartDecision.EXHAUSTED else Reason.FAILED
                finish_failed(self.observed, self.result, reason, failure.text)
            else:
                stop_role(self.observed, self.result, self.role, failure)
            return
        self.result.set(**{ATTEMPT_FIELD[self.role]: self.attempt + 1}, **with_restarts(status, self.role, following))
        reason = _WAITING.get(failure.failure, Reason.BACKING_OFF) if pause else Reason.RESTARTING
        outlook = self._outlook(failure.failure, pause)
        if nodes is not None:
            self.result.set(gang_nodes=nodes)
            outlook += f" Attempt {self.attempt + 1} has {nodes} of {self.most_nodes} nodes."
        self.set_reason(reason, f"Attempt {self.attempt} failed: {failure.text}{outlook}")
        self.result.condition(ConditionType.READY, False, reason, failure.text)
        self.result.emit("Warning", Reason.RESTARTING, f"Attempt {self.attempt} of {self.role} failed: {failure.text}")
        if batch_job is not None:
            self.result.delete(batch_job)

    def _wait_for_pods(self, current: JobState, batch_job: BatchJobView, pending: Pending) -> None:
        spec, now = self.observed.job.spec, self.result.now
        if current.state is State.QUEUED:
            before = find_condition(self.observed.job.status.conditions, CONDITION[self.role])
            if self.record is not None and before is not None and before.reason == Reason.RUNNING:
                # The queue has preempted the attempt. This is recorded once, and does not count as a failure.
                record = self.record.model_copy(update={"interruptions": self.record.interruptions + 1})
                self.result.set(attempts=with_record(self.observed.job.status, record))
                message = (
                    f"The queue has preempted attempt {self.attempt} of {self.role}; it continues once it is admitted again."
                )
                self.result.emit("Warning", Reason.QUEUED, message)
        elif not pending.is_capacity and spec is not None:
            deadline = startup_deadline(spec.run, batch_job, current.pods)
            if deadline is not None and now >= deadline:
                self._did_not_start(pending, batch_job, spec.run.startup_deadline_seconds)
                return
            if deadline is not None:
                self.result.requeue_at(deadline)
        age = (now - batch_job.created).total_seconds()
        if not pending.needs_attention and age < QUIET_SECONDS:
            self.result.requeue_after(QUIET_SECONDS - age)
            return
        if pending.needs_attention and current.state is not State.QUEUED:
            self.result.warn_once(CONDITION[self.role], pending.reason, pending.text)
        self.set_reason(pending.reason, pending.text)
        self.result.condition(ConditionType.READY, False, pending.reason, pending.text)

    def _did_not_start(self, pending: Pending, batch_job: BatchJobView, seconds: int) -> None:
        """Handle pods that have a node but do not start. The job ends only if it has no checkpoint yet.

        Training gives up, because a gang's other pods hold accelerators; merge and publish continue once the cause is fixed.
        """
        message = f"Not all pods of {self.role} ran within {seconds} s of being placed. {pending.text}"
        if self.role in (Role.MERGE, Role.PUBLISH):
            if not start_next_attempt(self.observed, self.result, self.role):
                self.set_reason(pending.reason, pending.text)
                self.result.stall(Reason.STARTUP_DEADLINE_EXCEEDED, message)
        elif self.role is Role.TRAIN and newest_checkpoint(self.observed.job.status, Role.TRAIN) is not None:
            self.fail(Failure(pending.failure, message, POLICY[pending.failure].advice), batch_job)
        else:
            finish_failed(self.observed, self.result, Reason.STARTUP_DEADLINE_EXCEEDED, message)

    def _pauses(self) -> bool:
        """Whether the pause after the latest failure is not over yet. The condition has shown the pause since that failure."""
        status = self.observed.job.status
        latest = latest_of(status, self.role)
        restarts = restarts_of(status, self.role)
        if latest is None or latest.outcome is not AttemptOutcome.FAILED or latest.failure is None or not restarts.in_a_row:
            return False
        pause = pause_seconds(latest.failure, restarts, self.role, self.observed.job.uid)
        until = moment_after(latest.end_time, pause)
        if until is None or self.result.now >= until:
            return False
        if (until - self.result.now).total_seconds() > 2 * pause:
            # An earlier leader's clock was ahead by more than the pause, so it is not known when the pause began.
            return False
        self.result.requeue_at(until)
        return True

    def _outlook(self, failure: FailureClass, pause: float) -> str:
        if not pause:
            return ""
        following = moment_after(timestamp(self.result.now), pause)
        message = f" The next attempt starts at {timestamp(following)}." if following is not None else ""
        policy = POLICY[failure]
        restarts = restarts_of(self.observed.job.status, self.role)
        if policy.longest_seconds is not None:
            end = moment_after(row_of(failure, restarts).since or timestamp(self.result.now), policy.longest_seconds)
            message += f" It is tried until {timestamp(end)}." if end is not None else ""
        return message
