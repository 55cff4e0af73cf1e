"""Runs the next attempt of a gang of one pod in the same pod: the kubelet restarts its container, which keeps node, queue and
image.

The container then waits until its pod's label names the attempt that it is to run. The label is changed only once status has
the end of the previous attempt and the new number, so nothing runs under a number that is not on record. A pod runs at most two
attempts, because the kubelet pauses before every restart after the first.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from finetune_job.failures import EXIT_CODES, PROCESS_FAILURES, FailureClass
from finetune_job.names import Role
from finetune_operator.decide.children_seen import BatchJobView, PodView
from finetune_operator.decide.classify import Failure
from finetune_operator.decide.job_state import JobState, State
from finetune_operator.decide.observed import Observed

RESTART_GRACE = timedelta(seconds=10)
"""How long the kubelet may take to restart a container; kubelets of older releases never do."""
_CODES = frozenset(EXIT_CODES[failure] for failure in PROCESS_FAILURES)


def continuing_pod(observed: Observed, batch_job: BatchJobView | None, failure: FailureClass, attempt: int) -> PodView | None:
    """Return the pod in which the next attempt can run, because its container was restarted and waits; None if there is none."""
    if batch_job is None or failure not in PROCESS_FAILURES or not _may_continue(batch_job, attempt):
        return None
    pods = observed.pods_of_job(batch_job)
    if len(pods) != 1 or not _is_alive(pods[0]) or pods[0].restarts != 1:
        return None
    return pods[0] if pods[0].started is not None and pods[0].exit_code is None else None


def await_restart(observed: Observed, current: JobState, attempt: int, now: datetime) -> JobState:
    """Delay the verdict on a failure after which the kubelet is about to restart the container."""
    job = current.batch_job
    if current.state is not State.FAILED or job is None or not _may_continue(job, attempt):
        return current
    pods = observed.pods_of_job(job)
    if len(pods) != 1 or not _is_alive(pods[0]) or pods[0].started is None:
        return current
    if pods[0].restarts or pods[0].exit_code not in _CODES or pods[0].finished is None:
        return current
    until = pods[0].finished + RESTART_GRACE
    return current if now >= until else JobState(State.FAILING, job, current.pods, requeue_at=until)


def pods_to_tell(observed: Observed, attempt: int) -> tuple[PodView, ...]:
    """Pods whose label has to be set to this attempt, because status says that they continue with it."""
    job = observed.batch_job(Role.TRAIN, attempt)
    if job is None or job.deleting or job.attempt == attempt:
        return ()
    return tuple(pod for pod in observed.pods_of_job(job) if _is_alive(pod) and pod.label_attempt != attempt)


def unless_label_refused(observed: Observed, current: JobState, attempt: int) -> JobState:
    """Turn the state into a failure if the API server refuses the label that lets the pod continue."""
    refused = observed.refused
    if (
        current.failure is not None
        or refused is None
        or refused.name not in [pod.name for pod in pods_to_tell(observed, attempt)]
    ):
        return current
    message = f"The API server refused the label that lets pod {refused.name} continue ({refused.code}): {refused.message}"
    failure = Failure(FailureClass.INFRASTRUCTURE, message, "Let the operator patch pods, as the role of the chart does.")
    return JobState(State.FAILED, current.batch_job, current.pods, failure=failure)


def _may_continue(job: BatchJobView, attempt: int) -> bool:
    ends = job.deleting or job.suspended or job.has("Failed", "FailureTarget", "Complete", "SuccessCriteriaMet")
    return job.restarts_container and job.attempt == attempt and not ends


def _is_alive(pod: PodView) -> bool:
    return pod.phase == "Running" and not pod.gone and pod.deletion_requested is None and not pod.disruption
