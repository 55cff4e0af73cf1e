"""What the pods of a Job wait for: capacity, which is waited for without a limit, or something that keeps them from starting."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.failures import FailureClass
from finetune_job.reasons import Reason
from finetune_operator.decide.observed import BatchJobView, PodView

_IMAGE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable"}
)
_MOUNT_STATES = frozenset({"CreateContainerConfigError"})
_MOUNT_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_QUOTA = "exceeded quota"
"""How the API server's quota plugin begins its refusals."""


@dataclass(frozen=True)
class Pending:
    """Why not every pod has started."""

    reason: Reason
    text: str
    is_capacity: bool = False
    """Only time or somebody else's end helps: never a failure."""
    failure: FailureClass = FailureClass.UNKNOWN
    """What it is once it has lasted too long."""

    @property
    def is_trouble(self) -> bool:
        """Whether it is told at once: somebody may have to do something."""
        return self.reason is not Reason.WAITING_FOR_PODS


def is_quota(message: str) -> bool:
    """Whether a refusal of the API server is that of a quota."""
    return _QUOTA in message


def pending(batch_job: BatchJobView, pods: tuple[PodView, ...], num_pods: int) -> Pending:
    """What the Job of so many pods waits for; the worst first."""
    started = len({pod.node_rank for pod in pods if pod.started is not None or pod.is_terminal})
    said = f"{started} of {num_pods} pods have started."
    waiting = [pod for pod in pods if pod.started is None and not pod.is_terminal]
    troubles = [found for found in (_trouble(pod, said) for pod in waiting) if found is not None]
    if troubles:
        return min(troubles, key=lambda one: one.is_capacity)
    if len(waiting) + started < num_pods:
        refused = [text for text in batch_job.events if text.startswith("FailedCreate")]
        if refused:
            quota = is_quota(refused[-1])
            return Pending(Reason.CREATE_REFUSED, f"{said} {refused[-1]}", is_capacity=quota, failure=FailureClass.ADMISSION)
    # That a pod is pending says nothing new, and would cost a status write for each of a thousand jobs.
    causes = (f"{said} {pod.name}: {_latest(pod) or pod.waiting_reason}" for pod in waiting if pod.events or pod.waiting_reason)
    return Pending(Reason.WAITING_FOR_PODS, next(causes, said))


def _trouble(pod: PodView, said: str) -> Pending | None:
    if pod.unschedulable:
        return Pending(Reason.UNSCHEDULABLE, f"{said} {pod.name}: {pod.unschedulable}", is_capacity=True)
    place = f"{pod.name} on node {pod.node or 'unknown'}"
    if pod.waiting_reason in _IMAGE:
        pulls = [text for text in pod.events if "pull" in text and "image" in text and "BackOff" not in text]
        text = f"{said} {place}: {pod.waiting_reason}. {pod.waiting_message or (pulls[-1] if pulls else _latest(pod))}".rstrip()
        return Pending(Reason.IMAGE_PULL_FAILED, text, failure=FailureClass.IMAGE_PULL)
    mounts = [text for text in pod.events if text.startswith(_MOUNT_EVENTS)]
    if mounts or pod.waiting_reason in _MOUNT_STATES:
        text = f"{said} {place}: {mounts[-1] if mounts else _latest(pod) or pod.waiting_reason}"
        return Pending(Reason.MOUNT_FAILED, text, failure=FailureClass.MOUNT)
    return None


def _latest(pod: PodView) -> str:
    return pod.events[-1] if pod.events else ""
