"""Derives the state of one role's Job from the Job and its pods, and why pods are waiting: for capacity, which may take
indefinitely long, or because something keeps them from starting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum

from finetune_job.failures import FailureClass, Outcome, TerminationReport, parse_envelope
from finetune_job.names import Role
from finetune_job.reasons import Reason
from finetune_operator.decide.failures.classify import NODE_LOST, OVERDUE, Failure, classify, failures_of
from finetune_operator.decide.seen.children_seen import BatchJobView, PodView
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.stage import attempt_of, current_role, is_ended
from finetune_operator.decide.seen.times import startup_deadline

_IMAGE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable"}
)
_MOUNT_STATES = frozenset({"CreateContainerConfigError"})
_MOUNT_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_QUOTA = "exceeded quota"
"""Text that identifies refusals by the API server's quota plugin."""
EVIDENCE_GRACE_SECONDS = 20
"""How long to wait for the cause of a failure while only echoes are seen. A rank that only saw a failed collective waits 15 s
before it exits, so that the culprit exits first; the other 5 s allow for a late watch."""
REPORT_GRACE_SECONDS = 10
"""How long to wait for the report of a successful pod, because Jobs and pods have separate watches."""
OVERDUE_GRACE = timedelta(seconds=30)
"""How long a pod may exceed its grace period before its node counts as lost: kubelets and clocks may be late."""


@dataclass(frozen=True)
class Pending:
    """Why not every pod has started."""

    reason: Reason
    text: str
    is_capacity: bool = False
    """Whether the pods wait for capacity. That is never a failure, however long it takes."""
    failure: FailureClass = FailureClass.UNKNOWN
    """Class of the failure if the pods wait too long."""

    @property
    def needs_attention(self) -> bool:
        """Whether to report the wait at once, because a human may have to act."""
        return self.reason is not Reason.WAITING_FOR_PODS


def is_quota(message: str) -> bool:
    """Whether the API server refused because of a quota."""
    return _QUOTA in message


def pending(batch_job: BatchJobView, pods: tuple[PodView, ...], num_pods: int) -> Pending:
    """Return the most serious reason why a Job with this number of pods is waiting."""
    started = len({pod.node_rank for pod in pods if pod.started is not None or pod.is_terminal})
    progress = f"{started} of {num_pods} pods have started."
    waiting = [pod for pod in pods if pod.started is None and not pod.is_terminal]
    problems = [problem for problem in (_start_problem(pod, progress) for pod in waiting) if problem is not None]
    if problems:
        return min(problems, key=lambda problem: problem.is_capacity)
    if len(waiting) + started < num_pods:
        refused = [text for text in batch_job.events if text.startswith("FailedCreate")]
        if refused:
            quota = is_quota(refused[-1])
            return Pending(Reason.CREATE_REFUSED, f"{progress} {refused[-1]}", is_capacity=quota, failure=FailureClass.ADMISSION)
    # Pods that are merely pending are not reported: that would add nothing, but cost a status write for each of a thousand jobs.
    causes = (
        f"{progress} {pod.name}: {_latest(pod) or pod.waiting_reason}" for pod in waiting if pod.events or pod.waiting_reason
    )
    return Pending(Reason.WAITING_FOR_PODS, next(causes, progress))


def _start_problem(pod: PodView, progress: str) -> Pending | None:
    if pod.unschedulable:
        return Pending(Reason.UNSCHEDULABLE, f"{progress} {pod.name}: {pod.unschedulable}", is_capacity=True)
    place = f"{pod.name} on node {pod.node or 'unknown'}"
    if pod.waiting_reason in _IMAGE:
        pulls = [text for text in pod.events if "pull" in text and "image" in text and "BackOff" not in text]
        text = (
            f"{progress} {place}: {pod.waiting_reason}. {pod.waiting_message or (pulls[-1] if pulls else _latest(pod))}".rstrip()
        )
        return Pending(Reason.IMAGE_PULL_FAILED, text, failure=FailureClass.IMAGE_PULL)
    mounts = [text for text in pod.events if text.startswith(_MOUNT_EVENTS)]
    if mounts or pod.waiting_reason in _MOUNT_STATES:
        text = f"{progress} {place}: {mounts[-1] if mounts else _latest(pod) or pod.waiting_reason}"
        return Pending(Reason.MOUNT_FAILED, text, failure=FailureClass.MOUNT)
    return None


def _latest(pod: PodView) -> str:
    return pod.events[-1] if pod.events else ""


class State(Enum):
    """State of a Job."""

    ABSENT = "there is no such Job"
    LOST = "somebody else deleted the Job"
    QUEUED = "a queue holds the Job back"
    WAITING = "not every pod has started"
    RUNNING = "every pod has started"
    FAILING = "it fails, and the cause is not known yet"
    FAILED = "it failed"
    SUCCEEDED = "it succeeded"


@dataclass(frozen=True)
class JobState:
    """The state of a Job, and the details that belong to it."""

    state: State
    batch_job: BatchJobView | None = None
    pods: tuple[PodView, ...] = ()
    failure: Failure | None = None
    """Why the Job failed; only set if the state is FAILED or LOST."""
    pending: Pending | None = None
    """Why not every pod has started; only set if the state is QUEUED or WAITING."""
    requeue_at: datetime | None = None

    @property
    def report(self) -> TerminationReport | None:
        """The report of node rank 0's pod once it has ended, unless the report is about a failure."""
        for pod in self.pods:
            if pod.node_rank == 0 and pod.is_terminal and pod.termination_message:
                report = parse_envelope(pod.termination_message)
                if report is not None and report.outcome is not Outcome.FAILED:
                    return report
        return None


def job_state(observed: Observed, role: Role, attempt: int, num_pods: int, *, was_seen: bool, now: datetime) -> JobState:
    """Return the state of the Job of a role and attempt. `was_seen`: whether an earlier pass recorded that the Job existed."""
    job = observed.batch_job(role, attempt)
    pods = observed.pods_of(role, attempt)
    if job is None or job.deleting:
        if job is None and not was_seen:
            return JobState(State.ABSENT)
        cause = classify(pods, FailureClass.INFRASTRUCTURE, "The Job was deleted by somebody else.")
        return JobState(State.LOST, job, pods, failure=cause)
    # Pods that were stopped by a suspension belong to an earlier run of the same Job.
    pods = tuple(pod for pod in pods if not _belongs_to_earlier_life(pod, job.start_time))
    pods = tuple(_marked_if_overdue(pod, now) for pod in pods)
    if job.has("Complete", "SuccessCriteriaMet"):
        done = JobState(State.SUCCEEDED, job, pods)
        ends = (condition.since for condition in job.conditions if condition.type in ("Complete", "SuccessCriteriaMet"))
        since = next(ends, None)
        until = None if since is None else since + timedelta(seconds=REPORT_GRACE_SECONDS)
        waits_for_report = done.report is None and until is not None and now < until
        return JobState(State.RUNNING, job, pods, requeue_at=until) if waits_for_report else done
    failed = job.has("Failed", "FailureTarget")
    if job.suspended and not failed:
        message = job.queue or "A queue holds the Job back until there is room for it."
        return JobState(State.QUEUED, job, pods, pending=Pending(Reason.QUEUED, message, is_capacity=True))
    broken = [pod for pod in pods if _broke(pod)]
    if failed or broken:
        return _failed(job, pods, num_pods, now)
    lost = [failure for failure in failures_of(pods) if failure.failure is FailureClass.NODE_LOST]
    if lost:
        # Nothing else detects this: the pod's phase stays Running, and the Job would wait for it forever.
        return JobState(State.FAILED, job, pods, failure=classify(pods, FailureClass.NODE_LOST, lost[0].message))
    started = {pod.node_rank for pod in pods if pod.started is not None or pod.is_terminal}
    if len(started) < num_pods:
        return JobState(State.WAITING, job, pods, pending=pending(job, pods, num_pods))
    overdue = [pod.deletion_due + OVERDUE_GRACE for pod in pods if pod.deletion_due is not None and not pod.is_terminal]
    return JobState(State.RUNNING, job, pods, requeue_at=min((moment for moment in overdue if moment > now), default=None))


def late_to_start(observed: Observed, now: datetime) -> BatchJobView | None:
    """Return the Job whose pods seem not to have started in time, else None. The caller reads the pods again before it gives up,
    because watches may be late, and giving up can end the FineTuneJob.
    """
    status, spec = observed.job.status, observed.job.spec
    role = current_role(status)
    attempt = attempt_of(status, role)
    job = observed.batch_job(role, attempt)
    if job is None or spec is None or spec.run.suspend or observed.job.deleting or is_ended(status):
        return None
    current = job_state(observed, role, attempt, job.parallelism or 1, was_seen=True, now=now)
    if current.state is not State.WAITING or current.pending is None or current.pending.is_capacity:
        return None
    deadline = startup_deadline(spec.run, job, current.pods)
    return job if deadline is not None and now >= deadline else None


def _belongs_to_earlier_life(pod: PodView, start: datetime | None) -> bool:
    """Whether a suspension stopped this pod. Only times of the API server are compared: a node's clock may be behind.

    The Job controller removes the start time when it suspends a Job, and sets it again some moments after the Job is resumed.
    """
    if start is None:
        return pod.gone or pod.deletion_requested is not None
    return pod.deletion_requested is not None and pod.deletion_requested < start


def _marked_if_overdue(pod: PodView, now: datetime) -> PodView:
    """Mark a pod with the disruption `OVERDUE` if it should be gone by now but still exists because its node does not answer."""
    if pod.is_terminal or pod.disruption in NODE_LOST or pod.deletion_due is None or now < pod.deletion_due + OVERDUE_GRACE:
        return pod
    return replace(pod, disruption=OVERDUE)


def ends_by_itself(batch_job: BatchJobView, pods: tuple[PodView, ...]) -> bool:
    """Whether a Job has ended, or the Job controller is stopping it because one of its pods failed."""
    ended = batch_job.has("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
    return ended or any(_broke(pod) for pod in pods)


def _broke(pod: PodView) -> bool:
    """Whether a pod failed on its own. Deleted pods do not count: if the Job controller deletes pods, the Job has a condition."""
    if pod.gone or pod.deletion_requested is not None:
        return False
    return pod.phase == "Failed" or (pod.exit_code is not None and pod.exit_code != 0)


def _failed(job: BatchJobView, pods: tuple[PodView, ...], num_pods: int, now: datetime) -> JobState:
    target = next((condition for condition in job.conditions if condition.type in ("FailureTarget", "Failed")), None)
    disrupted = target is not None and target.reason == "PodFailurePolicy"
    failure = classify(
        pods,
        FailureClass.INFRASTRUCTURE if disrupted else FailureClass.UNKNOWN,
        (target.message or target.reason) if target is not None else "A pod failed.",
    )
    known = failures_of(pods)
    if disrupted or (known and not known[0].is_echo):
        return JobState(State.FAILED, job, pods, failure=failure)
    if len({pod.node_rank for pod in pods if pod.is_terminal}) >= num_pods:
        return JobState(State.FAILED, job, pods, failure=failure)
    signs = [pod_failure.time for pod_failure in known] + (
        [target.since] if target is not None and target.since is not None else []
    )
    until = min(signs, default=now) + timedelta(seconds=EVIDENCE_GRACE_SECONDS)
    # A pod that outlives its grace period is on a lost node, which is then the cause. Waiting for it costs nothing, because the
    # next attempt has to wait for this pod anyway.
    due = [pod.deletion_due for pod in pods if pod.deletion_due is not None and not pod.is_terminal]
    until = max([until, *(moment + OVERDUE_GRACE for moment in due)])
    if now >= until or not signs:
        return JobState(State.FAILED, job, pods, failure=failure)
    return JobState(State.FAILING, job, pods, requeue_at=until)
