"""What the stages of all roles have in common: create the Job, wait for it under its deadline, try again or give up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_job.status.conditions import find
from finetune_operator.decide.attempts import closed
from finetune_operator.decide.classify import Failure
from finetune_operator.decide.deadlines import startup_deadline
from finetune_operator.decide.draft import Draft
from finetune_operator.decide.finish import finish_failed
from finetune_operator.decide.observed import BatchJobView, Observed
from finetune_operator.decide.restart_policy import Verdict, after, verdict
from finetune_operator.decide.stage import ATTEMPT_FIELD, CONDITION, attempt_of, left_of_earlier_attempts
from finetune_operator.decide.standing import Standing, State, standing

LOOK_AGAIN_SECONDS = 5.0
"""While an earlier attempt disappears."""
_REASONS = {FailureClass.VERIFICATION_FAILED: Reason.VERIFICATION_FAILED}


@dataclass(frozen=True)
class RoleStage:
    """One role in one pass."""

    observed: Observed
    draft: Draft
    role: Role
    waits_on: bool = False
    """Whether pods that do not start in time stall the job, until they do, instead of ending it."""

    @property
    def attempt(self) -> int:
        """Number of the current attempt."""
        return attempt_of(self.observed.job.status, self.role)

    def say(self, reason: Reason, message: str = "") -> None:
        """Set the condition of this stage, which is not done."""
        self.draft.condition(CONDITION[self.role], None, reason, message)

    def create(self, build: Callable[[], list[Mapping[str, Any]]]) -> None:
        """Create the Job of the current attempt, once nothing of an earlier one is left."""
        left = left_of_earlier_attempts(self.observed)
        if left:
            self.say(Reason.RESTARTING, left)
            self.draft.condition(ConditionType.READY, False, Reason.RESTARTING, left)
            self.draft.wake_after(LOOK_AGAIN_SECONDS)
            return
        for body in build():
            self.draft.create(body)
        self.say(Reason.WAITING_FOR_PODS, f"Attempt {self.attempt} is being created.")
        self.draft.condition(ConditionType.READY, False, Reason.WAITING_FOR_PODS)

    def drive(
        self,
        build: Callable[[], Mapping[str, Any]],
        succeeded: Callable[[Standing], None],
        refused: Callable[[Failure], bool] = lambda _failure: False,
    ) -> None:
        """One pass over the Job of a single pod. `refused`: whether it has dealt with a failure that a human has to mend."""
        before = find(self.observed.job.status.conditions, CONDITION[self.role])
        was_seen = before is not None and before.reason == Reason.RUNNING
        stands = standing(self.observed, self.role, self.attempt, 1, was_seen=was_seen, now=self.draft.now)
        if stands.state is State.ABSENT:
            self.create(lambda: [build()])
        elif stands.state is State.SUCCEEDED:
            succeeded(stands)
        elif stands.failure is not None:
            if not refused(stands.failure):
                self.fail(stands.failure, stands.batch_job)
        elif stands.batch_job is not None:
            self.wait(stands, stands.batch_job)

    def wait(self, stands: Standing, batch_job: BatchJobView) -> None:
        """Say what the Job is doing, and end the job where its pods take too long to start."""
        spec = self.observed.job.spec
        if stands.look_again is not None:
            self.draft.wake_at(stands.look_again)
        if stands.state is State.WAITING and spec is not None:
            deadline = startup_deadline(spec.run, batch_job)
            if self.draft.now >= deadline:
                message = f"Not all pods of {self.role} ran within {spec.run.startup_deadline_seconds} s. {stands.pending}"
                if self.waits_on:
                    self.say(Reason.WAITING_FOR_PODS, stands.pending)
                    self.draft.stall(Reason.STARTUP_DEADLINE_EXCEEDED, message)
                else:
                    finish_failed(self.observed, self.draft, Reason.STARTUP_DEADLINE_EXCEEDED, message)
                return
            self.draft.wake_at(deadline)
        if stands.state in (State.WAITING, State.QUEUED):
            self.say(Reason.WAITING_FOR_PODS, stands.pending)
            self.draft.condition(ConditionType.READY, False, Reason.WAITING_FOR_PODS, stands.pending)
        elif stands.state is State.RUNNING:
            self.say(Reason.RUNNING, f"Attempt {self.attempt} runs.")
            self.draft.condition(ConditionType.READY, True, Reason.RUNNING)
        else:
            self.say(Reason.RUNNING, f"Attempt {self.attempt} fails; waiting for the cause.")
            self.draft.condition(ConditionType.READY, False, Reason.RUNNING)

    def fail(self, failure: Failure, batch_job: BatchJobView | None) -> None:
        """Restart or stop, as the policy says. The new number and the evidence are written before the old Job is deleted."""
        status, spec = self.observed.job.status, self.observed.job.spec
        if spec is None:
            return
        decision = verdict(failure.failure, status.restarts, spec.run.max_restarts)
        restarts = decision in (Verdict.RESTART_COUNTED, Verdict.RESTART_UNCOUNTED)
        if self.role is Role.TRAIN:
            self.draft.set(
                attempts=closed(
                    status, self.attempt, self.draft.now, "Failed", failure, counted=decision is Verdict.RESTART_COUNTED
                )
            )
        if not restarts:
            reason = Reason.RESTARTS_EXHAUSTED if decision is Verdict.EXHAUSTED else _REASONS.get(failure.failure, Reason.FAILED)
            finish_failed(self.observed, self.draft, reason, failure.text)
            return
        self.draft.set(**{ATTEMPT_FIELD[self.role]: self.attempt + 1}, restarts=after(decision, status.restarts))
        self.say(Reason.RESTARTING, f"Attempt {self.attempt} failed: {failure.text}")
        self.draft.condition(ConditionType.READY, False, Reason.RESTARTING, failure.text)
        self.draft.emit("Warning", Reason.RESTARTING, f"Attempt {self.attempt} of {self.role} failed: {failure.text}")
        if batch_job is not None:
            self.draft.delete(batch_job)
