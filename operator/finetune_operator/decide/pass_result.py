"""Collects the actions that the stages decide on in one pass, and converts findings to the form that status has.

The new status is compared with the observed one only at the end, so a condition that is set twice in a pass changes at most once,
and a pass that changes nothing writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from finetune_job.api.status import Condition, FineTuneJobStatus
from finetune_job.conditions import ConditionValue, find_condition, initial_conditions, job_phase, with_condition
from finetune_job.finding import MAX_TEXT_LENGTH, Finding
from finetune_job.reasons import ConditionType, Reason
from finetune_job.stored_status import with_short_findings
from finetune_operator.decide.actions import Actions, Create, Delete, DeletedKind, Emit, Ungate
from finetune_operator.decide.operator_error import is_reported, ready_without_error
from finetune_operator.decide.seen.children_seen import BatchJobView
from finetune_operator.decide.seen.observed import JobView
from finetune_operator.decide.seen.stage import is_ended
from finetune_operator.decide.seen.times import timestamp

EVENT_LIMIT = 1024
"""Maximum length of an event's message, in characters."""
EVENTS_OF_FINDINGS = 16
"""Maximum number of findings that one pass reports as events; status also lists the others."""
FINDINGS_LIMIT = 64
"""Maximum number of findings in status."""


@dataclass
class PassResult:
    """Collects the outcome of a pass over `job` at `now`."""

    job: JobView
    now: datetime
    _values: dict[str, Any] = field(default_factory=dict)
    _conditions: dict[ConditionType, tuple[ConditionValue, Reason, str]] = field(default_factory=dict)
    _deletes: dict[tuple[str, str], Delete] = field(default_factory=dict)
    _ungates: list[Ungate] = field(default_factory=list)
    _creates: list[Create] = field(default_factory=list)
    _events: list[Emit] = field(default_factory=list)
    _requeue_after_seconds: float | None = None

    def set(self, **values: Any) -> None:
        """Set fields of the status by their Python names. The values are not validated again, so they must be valid. Each finding
        that is new for this generation of the job is also emitted as an event.
        """
        self._values.update(values)

    def has_value(self, name: str) -> bool:
        """Whether a field of the status was set in this pass."""
        return name in self._values

    def condition(self, kind: ConditionType, status: ConditionValue, reason: Reason, message: str = "") -> None:
        """Set a condition. If a pass sets it twice, the last call wins."""
        self._conditions[kind] = (status, reason, message[:MAX_TEXT_LENGTH])

    def stall(self, reason: Reason, message: str) -> None:
        """Stall the job until a human acts. Emits an event unless the job was already stalled for this reason."""
        before = find_condition(self.job.status.conditions, ConditionType.STALLED)
        if before is None or before.status != "True" or before.reason != reason:
            self.emit("Warning", reason, message)
        self.condition(ConditionType.STALLED, True, reason, message)
        self.condition(ConditionType.READY, False, reason, message)

    def warn_once(self, kind: ConditionType, reason: Reason, message: str) -> None:
        """Emit a warning event, unless the condition of type `kind` already had this reason before the pass."""
        before = find_condition(self.job.status.conditions, kind)
        if before is None or before.reason != reason:
            self.emit("Warning", reason, message)

    def delete(self, batch_job: BatchJobView) -> None:
        """Delete a batch Job, unless it is being deleted already."""
        if not batch_job.deleting:
            self.delete_object("Job", batch_job.name, batch_job.uid)

    def delete_object(self, kind: DeletedKind, name: str, uid: str, *, force: bool = False) -> None:
        """Delete a child."""
        self._deletes[(kind, name)] = Delete(kind, name, uid, force)

    def ungate(self, batch_job: BatchJobView, gate: str) -> None:
        """Remove a gate from a batch Job; other gates stay."""
        remaining = tuple(other for other in batch_job.admission_gates if other != gate)
        self._ungates.append(Ungate(batch_job.name, batch_job.uid, remaining))

    def create(self, body: Mapping[str, Any]) -> None:
        """Create a child."""
        self._creates.append(Create(body))

    def emit(self, kind: Literal["Normal", "Warning"], reason: Reason, message: str) -> None:
        """Emit an event once the status is written."""
        self._events.append(Emit(kind, reason, message[:EVENT_LIMIT]))

    def requeue_after(self, seconds: float) -> None:
        """Reconcile the job again after at most this number of seconds."""
        seconds = max(seconds, 0.0)
        self._requeue_after_seconds = (
            seconds if self._requeue_after_seconds is None else min(self._requeue_after_seconds, seconds)
        )

    def requeue_at(self, moment: datetime) -> None:
        """Reconcile the job again at `moment` or earlier."""
        self.requeue_after((moment - self.now).total_seconds())

    def actions(self) -> Actions:
        """Return the collected actions."""
        status = self._status()
        before = self.job.status
        is_judged_before = before.observed_generation == self.job.generation
        known = {(finding.rule, finding.field) for finding in before.findings} if is_judged_before else set()
        findings: Sequence[Finding] = self._values.get("findings", ())
        news = tuple(finding for finding in findings if (finding.rule, finding.field) not in known)
        for finding in news[:EVENTS_OF_FINDINGS]:
            place = f"{finding.field}: " if finding.field else ""
            kind: Literal["Normal", "Warning"] = "Warning" if finding.severity == "error" else "Normal"
            self.emit(kind, Reason.FINDING, f"{finding.rule}: {place}{finding.message} {finding.fix}")
        # A stage may have requested to create objects before another one ended the job.
        creates = () if is_ended(status) else tuple(self._creates)
        return Actions(
            status=None if status == before else status,
            deletes=tuple(self._deletes.values()),
            ungates=tuple(self._ungates),
            creates=creates,
            events=tuple(self._events),
            news=news,
            requeue_after_seconds=self._requeue_after_seconds,
        )

    def _status(self) -> FineTuneJobStatus:
        before = self.job.status
        now = timestamp(self.now)
        conditions: list[Condition] = list(before.conditions)
        if not conditions:
            conditions = initial_conditions(generation=self.job.generation, now=now)
        for kind, (status, reason, message) in self._conditions.items():
            conditions = with_condition(conditions, kind, status, reason, message, generation=self.job.generation, now=now)
        if is_reported(before) and ConditionType.READY not in self._conditions:
            status, reason, message = ready_without_error(conditions)
            ready = ConditionType.READY
            conditions = with_condition(conditions, ready, status, reason, message, generation=self.job.generation, now=now)
        return with_short_findings(
            before.model_copy(
                update={
                    **self._values,
                    "conditions": conditions,
                    "phase": str(job_phase(conditions)),
                    "observed_generation": self.job.generation,
                }
            )
        )


def status_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that status shows: the first ones, with shortened strings."""
    return [finding.shortened(MAX_TEXT_LENGTH) for finding in findings[:FINDINGS_LIMIT]]
