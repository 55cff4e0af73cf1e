"""The next attempt of a gang of one pod in that pod: the kubelet starts its container again, which keeps node, queue and image.

The container then waits until its pod's label names the attempt that it is to run. The label is changed only once status has the
end of the attempt before and the new number, so nothing runs under a number that is not on record. A pod runs two attempts at
the most: only for the first restart does the kubelet not pause.
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
"""How long the kubelet may take to start a container again; nodes of older releases do not."""
_CODES = frozenset(EXIT_CODES[failure] for failure in PROCESS_FAILURES)


def continuing_pod(observed: Observed, batch_job: BatchJobView | None, failure: FailureClass, attempt: int) -> PodView | None:
    """The pod in which the attempt after this one can run: its container was started again and waits. None: there is none."""
    if batch_job is None or failure not in PROCESS_FAILURES or not _may_continue(batch_job, attempt):
        return None
    pods = observed.pods_of_job(batch_job)
    if len(pods) != 1 or not _is_alive(pods[0]) or pods[0].restarts != 1:
        return None
    return pods[0] if pods[0].started is not None and pods[0].exit_code is None else None


def await_restart(observed: Observed, found: JobState, attempt: int, now: datetime) -> JobState:
    """The same, but a failure after which the kubelet is about to start the container again is not judged before it has."""
    job = found.batch_job
    if found.state is not State.FAILED or job is None or not _may_continue(job, attempt):
        return found
    pods = observed.pods_of_job(job)
    if len(pods) != 1 or not _is_alive(pods[0]) or pods[0].started is None:
        return found
    if pods[0].restarts or pods[0].exit_code not in _CODES or pods[0].finished is None:
        return found
    until = pods[0].finished + RESTART_GRACE
    return found if now >= until else JobState(State.FAILING, job, found.pods, requeue_at=until)


def pods_to_tell(observed: Observed, attempt: int) -> tuple[PodView, ...]:
    """Pods whose label is to name this attempt, which status says they continue with."""
    job = observed.batch_job(Role.TRAIN, attempt)
    if job is None or job.deleting or job.attempt == attempt:
        return ()
    return tuple(pod for pod in observed.pods_of_job(job) if _is_alive(pod) and pod.label_attempt != attempt)


def unless_label_refused(observed: Observed, found: JobState, attempt: int) -> JobState:
    """The same, or a failed attempt if the API server refuses the label by which its pod would be told of it."""
    refused = observed.refused
    if found.failure is not None or refused is None or refused.name not in [pod.name for pod in pods_to_tell(observed, attempt)]:
        return found
    said = f"The API server refused the label that lets pod {refused.name} continue ({refused.code}): {refused.message}"
    failure = Failure(FailureClass.INFRASTRUCTURE, said, "Let the operator patch pods, as the role of the chart does.")
    return JobState(State.FAILED, found.batch_job, found.pods, failure=failure)


def _may_continue(job: BatchJobView, attempt: int) -> bool:
    ends = job.deleting or job.suspended or job.has("Failed", "FailureTarget", "Complete", "SuccessCriteriaMet")
    return job.restarts_container and job.attempt == attempt and not ends


def _is_alive(pod: PodView) -> bool:
    return pod.phase == "Running" and not pod.gone and pod.deletion_requested is None and not pod.disruption
