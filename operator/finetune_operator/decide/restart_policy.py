"""The one table of what follows a failure, and the budgets."""

from __future__ import annotations

from enum import Enum

from finetune_job.api.status import Restarts
from finetune_job.failures import FailureClass


class Retry(Enum):
    """Whether a class of failure is tried again."""

    NEVER = "it would fail again"
    COUNTED = "within spec.run.maxRestarts"
    UNCOUNTED = "not the job's fault, within an absolute limit"


RETRY: dict[FailureClass, Retry] = {
    FailureClass.USER_CONFIG: Retry.NEVER,
    FailureClass.USER_DATA: Retry.NEVER,
    FailureClass.USER_MODEL: Retry.NEVER,
    FailureClass.NON_FINITE: Retry.NEVER,
    FailureClass.DEVICE_OUT_OF_MEMORY: Retry.NEVER,
    FailureClass.HOST_OUT_OF_MEMORY: Retry.NEVER,
    FailureClass.VERIFICATION_FAILED: Retry.NEVER,
    FailureClass.PLAN_MISMATCH: Retry.NEVER,
    FailureClass.DESTINATION_REFUSED: Retry.NEVER,
    FailureClass.COLLECTIVE: Retry.COUNTED,
    FailureClass.INTERNAL: Retry.COUNTED,
    FailureClass.STALLED: Retry.COUNTED,
    FailureClass.SOURCE_UNAVAILABLE: Retry.COUNTED,
    FailureClass.DESTINATION_UNAVAILABLE: Retry.COUNTED,
    FailureClass.CHECKPOINT_INVALID: Retry.COUNTED,
    # The next attempt removes what an interrupted save left behind, which may be what filled the disk.
    FailureClass.DISK_FULL: Retry.COUNTED,
    FailureClass.PREEMPTED: Retry.UNCOUNTED,
    FailureClass.INFRASTRUCTURE: Retry.UNCOUNTED,
    FailureClass.NODE_LOST: Retry.UNCOUNTED,
    FailureClass.REJECTED: Retry.UNCOUNTED,
    FailureClass.IMAGE_PULL: Retry.UNCOUNTED,
    FailureClass.MOUNT: Retry.UNCOUNTED,
    FailureClass.ADMISSION: Retry.UNCOUNTED,
    FailureClass.UNKNOWN: Retry.UNCOUNTED,
}

UNCOUNTED_LIMIT = 50
"""Restarts for which the job is not to blame: a job that is preempted more often makes no progress that is worth its start-ups."""
FIRST_BACKOFF_SECONDS = 10.0
LONGEST_BACKOFF_SECONDS = 300.0


class Verdict(Enum):
    """What follows a failure."""

    RESTART_COUNTED = "restart, counted"
    RESTART_UNCOUNTED = "restart, not counted"
    STOP = "stop: it would fail again"
    EXHAUSTED = "stop: the budget is used up"


def verdict(failure: FailureClass, restarts: Restarts, max_restarts: int) -> Verdict:
    """What follows a failure of this class after so many restarts."""
    retry = RETRY[failure]
    if retry is Retry.NEVER:
        return Verdict.STOP
    if retry is Retry.COUNTED:
        return Verdict.RESTART_COUNTED if restarts.counted < max_restarts else Verdict.EXHAUSTED
    return Verdict.RESTART_UNCOUNTED if restarts.uncounted < UNCOUNTED_LIMIT else Verdict.EXHAUSTED


def after(decision: Verdict, restarts: Restarts) -> Restarts:
    """The counters after a decision."""
    return Restarts(
        counted=restarts.counted + (decision is Verdict.RESTART_COUNTED),
        uncounted=restarts.uncounted + (decision is Verdict.RESTART_UNCOUNTED),
    )


def backoff_seconds(restarts: Restarts) -> float:
    """Pause before the next attempt: none before the first restart, then doubling."""
    earlier = restarts.counted + restarts.uncounted - 1
    if earlier <= 0:
        return 0.0
    return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(earlier - 1, 16), LONGEST_BACKOFF_SECONDS)
