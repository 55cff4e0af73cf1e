"""The policy for each failure class: its evidence, whether and how often it is retried, the pauses, and the advice.

`python -m finetune_operator.decide.failures.table` prints it as docs/reference/failures.md.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from finetune_job.api.status import FailureRow, Restarts
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_operator.decide.seen.times import moment_after, timestamp

FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 300.0
MOST_IN_A_ROW = 50
"""Maximum number of uncounted restarts of one class without progress. After that many, another restart is unlikely to help."""
MOST_WITHOUT_PROGRESS = 100
"""Maximum number of uncounted restarts without progress, summed over all classes that are limited by number, so that a job whose
failures alternate between classes does not restart forever."""
MOST_STALLED_STARTS = 5
"""Maximum number of restarts without progress if the ranks stall before they are connected."""
JITTER = 0.2
"""Maximum share by which pauses are shortened, differently for each job, so that a thousand jobs do not restart at once."""
_DAY = 86_400


class Retry(Enum):
    """Whether failures of a class are retried."""

    NEVER = "no"
    COUNTED = "counted"
    UNCOUNTED = "not counted"


@dataclass(frozen=True)
class Policy:
    """The policy for one failure class."""

    retry: Retry
    evidence: str
    """How the class is recognised."""
    advice: str = ""
    """Advice on what to change, used if the container left no hint."""
    first_pause: float = FIRST_PAUSE_SECONDS
    longest_pause: float = LONGEST_PAUSE_SECONDS
    most_in_a_row: int = MOST_IN_A_ROW
    """Maximum number of uncounted restarts without progress."""
    longest_seconds: int | None = None
    """Maximum time in seconds that uncounted restarts may go on without progress; if set, it replaces the limit by number."""
    outside: bool = False
    """Whether the cause is outside the job. If so, the job is stalled rather than failed when training gives up."""


_N, _C, _U = Retry.NEVER, Retry.COUNTED, Retry.UNCOUNTED

POLICY: dict[FailureClass, Policy] = {
    FailureClass.USER_CONFIG: Policy(
        _N, "Reported by the container.", "Correct the setting that the message names and apply a new job."
    ),
    FailureClass.USER_DATA: Policy(_N, "Reported by the container.", "Correct the data set that spec.data.source names."),
    FailureClass.USER_MODEL: Policy(
        _N,
        "Reported by the container.",
        "Check the model directory that spec.model.source names: config.json, weights and tokenizer.",
    ),
    FailureClass.NON_FINITE: Policy(
        _N,
        "Reported by a rank: the loss or the gradient norm is NaN or infinite.",
        "Lower spec.training.learningRate or spec.training.maxGradNorm, or raise spec.training.warmupRatio; look for records "
        "that are empty or damaged.",
    ),
    FailureClass.DEVICE_OUT_OF_MEMORY: Policy(
        _N,
        "Reported by a rank.",
        "Lower spec.training.microBatchSize or spec.data.maxSequenceLength, set spec.training.activationCheckpointing: Full, "
        "or raise spec.parallelism.nodes.",
    ),
    FailureClass.HOST_OUT_OF_MEMORY: Policy(
        _N,
        "The container's reason is `OOMKilled`, a rank reports it, or the kubelet evicted the pod because /dev/shm exceeded its "
        "limit.",
        "Use a profile with more memory for this role, or lower spec.training.microBatchSize if it trains on CPU cores.",
    ),
    FailureClass.VERIFICATION_FAILED: Policy(
        _N, "Reported by the merge.", "Read verification.json next to the quarantined model before you use it."
    ),
    FailureClass.PLAN_MISMATCH: Policy(
        _N,
        "Reported by the container: the plan file does not match the digest in the container's arguments.",
        "Somebody changed the plan's ConfigMap: restore its content and increase spec.run.retry.",
        outside=True,
    ),
    FailureClass.DESTINATION_REFUSED: Policy(
        _N, "Reported by the publication.", "Check spec.output.destination and the Secret that spec.output.secretRef names."
    ),
    FailureClass.COLLECTIVE: Policy(
        _C,
        "Reported by a rank, and no other rank reports a more specific failure; it is usually the echo of another failure.",
        "Look at the logs of the other ranks on the workspace and at the network between the nodes.",
    ),
    FailureClass.INTERNAL: Policy(
        _C,
        "An exception without a class of its own, an unknown exit code, or a SIGKILL that was not because of memory.",
        "Read the exception and the logs of the failing rank on the workspace.",
    ),
    FailureClass.STALLED: Policy(
        _C,
        "Reported by the ranks' watchdog (training.stepTimeoutSeconds), or no new step within run.stallDeadlineSeconds. Not "
        f"counted, and given up after {MOST_STALLED_STARTS} in a row, if the ranks were not connected yet.",
        "Read the stacks of the ranks on the workspace, or raise spec.training.stepTimeoutSeconds.",
        most_in_a_row=MOST_STALLED_STARTS,
    ),
    FailureClass.CHECKPOINT_INVALID: Policy(
        _C, "Reported by a rank.", "Look at the checkpoints on the workspace; a claim that loses writes damages them."
    ),
    FailureClass.DISK_FULL: Policy(
        _C,
        "Reported by the container, or the kubelet evicted the pod because a volume or container exceeded its own limit for the "
        "node's disk.",
        "Enlarge the claim, or lower spec.checkpoint.keep.",
        first_pause=60.0,
        outside=True,
    ),
    FailureClass.SOURCE_UNAVAILABLE: Policy(
        _U,
        "Reported by the fetch: the Hub or object store did not answer, or its answer was not usable.",
        "Check that the hub or object store of the profile can be reached from the cluster.",
        first_pause=30.0,
        longest_seconds=_DAY,
        outside=True,
    ),
    FailureClass.DESTINATION_UNAVAILABLE: Policy(
        _U,
        "Reported by the publication: the destination did not answer, or the connection broke.",
        "Check that the destination can be reached from the cluster.",
        first_pause=30.0,
        longest_seconds=_DAY,
        outside=True,
    ),
    FailureClass.PREEMPTED: Policy(_U, "The container exited on SIGTERM, with code 50 or 143.", outside=True),
    FailureClass.INFRASTRUCTURE: Policy(
        _U,
        "The pod was evicted, preempted or deleted by somebody else, or its Job was.",
        "Look at the nodes that the pods ran on.",
        outside=True,
    ),
    FailureClass.NODE_LOST: Policy(
        _U,
        "The taint manager or the pod garbage collector deletes the pod, or the pod is still there after its grace period.",
        "Look at the node that the message names.",
        outside=True,
    ),
    FailureClass.REJECTED: Policy(
        _U,
        "The kubelet failed the pod before any container ran: `UnexpectedAdmissionError`, `OutOfcpu`, `OutOfmemory`, ...",
        "Look at the node: its kubelet had no room for the pod, or a device plugin failed.",
        outside=True,
    ),
    FailureClass.DEVICE_FAULT: Policy(
        _U,
        "A rank reports that its GPU failed the test before training or that the driver reported a fault, or its node got a "
        "condition of `gpu.faultConditions` of the profile.",
        "Cordon the node that the message names, so that the next attempt runs elsewhere.",
        first_pause=60.0,
        most_in_a_row=5,
        outside=True,
    ),
    FailureClass.IMAGE_PULL: Policy(
        _U,
        "`ImagePullBackOff` or similar for run.startupDeadlineSeconds; it is reported at once, and the kubelet keeps trying.",
        "Check the image of the profile and the pull secrets of its registry.",
        longest_pause=3600.0,
        most_in_a_row=5,
        outside=True,
    ),
    FailureClass.MOUNT: Policy(
        _U,
        "`FailedMount` or similar for run.startupDeadlineSeconds; it is reported at once, and the kubelet keeps trying.",
        "Create the volume, Secret or ConfigMap that the message names.",
        longest_pause=3600.0,
        most_in_a_row=5,
        outside=True,
    ),
    FailureClass.ADMISSION: Policy(
        _U,
        "The API server refuses the Job's pods for run.startupDeadlineSeconds, not because of a quota; it is reported at once.",
        "Change the policy that the message names, so that it allows the pods of this profile.",
        longest_pause=3600.0,
        most_in_a_row=5,
        outside=True,
    ),
    FailureClass.UNKNOWN: Policy(
        _U,
        "A pod failed and left no evidence.",
        "No evidence was left; read the logs on the workspace.",
        most_in_a_row=10,
        outside=True,
    ),
}


class RestartDecision(Enum):
    """The decision after a failure."""

    RESTART_COUNTED = "restart, counted"
    RESTART_UNCOUNTED = "restart, not counted"
    STOP = "stop: it would fail again"
    EXHAUSTED = "stop: the budget is used up"

    @property
    def restarts(self) -> bool:
        """Whether another attempt follows."""
        return self in (RestartDecision.RESTART_COUNTED, RestartDecision.RESTART_UNCOUNTED)


def retry_of(failure: FailureClass, step: int | None) -> Retry:
    """Return whether a failure is retried. step: the step that its report names.

    A stall without a step means that the ranks were not connected yet, which is not the job's fault.
    """
    return Retry.UNCOUNTED if failure is FailureClass.STALLED and step is None else POLICY[failure].retry


def restart_decision(
    failure: FailureClass, restarts: Restarts, max_restarts: int, now: datetime, *, step: int | None = 0
) -> RestartDecision:
    """Decide what follows a failure of this class, given the earlier restarts of its role. step: the step in its report."""
    retry = retry_of(failure, step)
    if retry is Retry.NEVER:
        return RestartDecision.STOP
    if retry is Retry.COUNTED:
        return RestartDecision.RESTART_COUNTED if restarts.counted < max_restarts else RestartDecision.EXHAUSTED
    policy, row = POLICY[failure], row_of(failure, restarts)
    if policy.longest_seconds is None:
        limited = {str(other) for other, policy in POLICY.items() if policy.retry is _U and policy.longest_seconds is None}
        without_progress = sum(other.restarts for other in restarts.rows if other.failure in limited)
        is_given_up = row.restarts >= policy.most_in_a_row or without_progress >= MOST_WITHOUT_PROGRESS
    else:
        until = moment_after(row.since, policy.longest_seconds) if row.restarts else None
        is_given_up = until is not None and now >= until
    return RestartDecision.EXHAUSTED if is_given_up else RestartDecision.RESTART_UNCOUNTED


def row_of(failure: FailureClass, restarts: Restarts) -> FailureRow:
    """Restarts of this class since the latest progress. Counters of earlier releases have no class and count for all."""
    if not restarts.rows:
        return FailureRow(failure=str(failure), restarts=restarts.in_a_row, since=restarts.in_a_row_since)
    return next((row for row in restarts.rows if row.failure == failure), FailureRow(failure=str(failure)))


def with_progress(restarts: Restarts, checkpoint_step: int | None) -> Restarts:
    """Return the counters. If the newest checkpoint, which has this step, is newer than at the last failure, the counts of
    restarts in a row are reset.
    """
    if checkpoint_step is None or (restarts.at_checkpoint is not None and checkpoint_step <= restarts.at_checkpoint):
        return restarts
    return with_new_row(restarts).model_copy(update={"at_checkpoint": checkpoint_step})


def with_new_row(restarts: Restarts) -> Restarts:
    """Reset the counts of restarts in a row, but not the restarts that count against `run.maxRestarts`."""
    return restarts.model_copy(update={"in_a_row": 0, "in_a_row_since": "", "rows": []})


def counters_after(decision: RestartDecision, failure: FailureClass, restarts: Restarts, now: datetime) -> Restarts:
    """Return the counters after this decision about a failure of this class."""
    if not decision.restarts:
        return restarts
    before = row_of(failure, restarts)
    row = FailureRow(failure=str(failure), restarts=before.restarts + 1, since=before.since or timestamp(now))
    return restarts.model_copy(
        update={
            "counted": restarts.counted + (decision is RestartDecision.RESTART_COUNTED),
            "uncounted": restarts.uncounted + (decision is RestartDecision.RESTART_UNCOUNTED),
            "in_a_row": restarts.in_a_row + 1,
            "in_a_row_since": restarts.in_a_row_since or timestamp(now),
            "rows": [*(other for other in restarts.rows if other.failure != failure), row],
        }
    )


def pause_seconds(failure: FailureClass, restarts: Restarts, role: Role, seed: str) -> float:
    """Return the pause before the next attempt. It doubles with every restart in a row; `seed` determines the jitter.

    A gang's first restart has no pause unless the class sets one, because all of the gang's accelerators idle during a pause.
    """
    policy = POLICY[failure]
    earlier = max(restarts.in_a_row - 1, 0)
    if role is Role.TRAIN and policy.first_pause == FIRST_PAUSE_SECONDS:
        if earlier == 0:
            return 0.0
        earlier -= 1
    drawn = int.from_bytes(hashlib.sha256(f"{seed}/{role}/{restarts.in_a_row}".encode()).digest()[:4], "big") / 2**32
    return float(min(policy.first_pause * 2.0 ** min(earlier, 16), policy.longest_pause)) * (1.0 - JITTER * drawn)
