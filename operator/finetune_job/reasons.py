"""Condition types and reasons: every word that may appear in `status.conditions`, in events and in metric labels."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Condition types, the stages first and in order, the summaries after them."""

    VALIDATED = "Validated"
    """The manifest and its profile pass every rule, and the plan is frozen."""
    FETCHED = "Fetched"
    """Model and data from outside the cluster are on the workspace."""
    PREPARED = "Prepared"
    """Preflight accepted the model, the data and the settings."""
    REHEARSED = "Rehearsed"
    """The job has passed on a scaled-down model; nothing waits for this, unless the profile requires it."""
    TRAINED = "Trained"
    """The last optimizer step is done and the trained weights are on the workspace."""
    MERGED = "Merged"
    """The merged model exists and passed its verification."""
    PUBLISHED = "Published"
    """The results are where `output.destination` says."""
    READY = "Ready"
    """Accepted, and its pods are placed."""
    SUCCEEDED = "Succeeded"
    """Every stage that the job asks for is done."""
    FINISHED = "Finished"
    """The job has ended, successfully or not; nothing changes any more."""
    STALLED = "Stalled"
    """The job waits until a human acts; the message says what to do."""
    SUSPENDED = "Suspended"
    """The job holds no pods because `spec.run.suspend` is true."""


STAGES = (
    ConditionType.VALIDATED,
    ConditionType.FETCHED,
    ConditionType.PREPARED,
    ConditionType.TRAINED,
    ConditionType.MERGED,
    ConditionType.PUBLISHED,
)


class Reason(StrEnum):
    """Why a condition is as it is."""

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        """A reason that another release wrote stays what it is: it equals none of these, and no pass ends over it."""
        if not isinstance(value, str):
            return None
        other = str.__new__(cls, value)
        other._name_ = other._value_ = value
        return other

    NOT_OBSERVED = "NotObserved"
    """First sight of the object."""
    ACCEPTED = "Accepted"
    """The manifest and its profile pass every rule."""
    REFUSED = "Refused"
    """A rule refused the manifest; `status.findings` names field, value, reason and fix."""
    INVALID_SPEC = "InvalidSpec"
    """The manifest does not have the shape of a FineTuneJob."""
    PROFILE_NOT_FOUND = "ProfileNotFound"
    """The cluster has no FineTuneProfile of the name in `spec.profile`, or no default one."""
    PROFILE_INVALID = "ProfileInvalid"
    """The FineTuneProfile does not have the shape of one; its administrator has to fix it."""
    CLAIM_NOT_FOUND = "ClaimNotFound"
    """A PersistentVolumeClaim that the job names does not exist in its namespace."""
    PENDING = "Pending"
    """The stage before it is not done."""
    RUNNING = "Running"
    """The pods of the stage run."""
    WAITING_FOR_PODS = "WaitingForPods"
    """The Job of the stage exists, and not all of its pods run yet."""
    WAITING_IN_LINE = "WaitingInLine"
    """As many jobs of the namespace are active as the profile's `maxActiveJobs` allows."""
    QUEUED = "Queued"
    """A queue holds the Job back until there is room for it; the message has the queue's own words."""
    UNSCHEDULABLE = "Unschedulable"
    """No node has room for a pod; capacity is waited for without a limit."""
    CREATE_REFUSED = "CreateRefused"
    """The API server refused a Job or its pods (a quota, an admission policy); the message has its words."""
    IMAGE_PULL_FAILED = "ImagePullFailed"
    """The image of a container cannot be pulled; the message has the kubelet's words."""
    MOUNT_FAILED = "MountFailed"
    """A volume, Secret or ConfigMap of a pod is missing or could not be mounted."""
    NODE_LOST = "NodeLost"
    """The node of a pod stopped answering."""
    BLOCKED_ON_NODE = "BlockedOnNode"
    """A pod of the earlier attempt may still run on a node that does not answer; the next attempt waits until it is gone."""
    WAITING_FOR_SOURCE = "WaitingForSource"
    """The Hub or the object store of the source does not answer; it is tried again until a deadline."""
    WAITING_FOR_DESTINATION = "WaitingForDestination"
    """The destination does not answer; it is tried again until a deadline."""
    BACKING_OFF = "BackingOff"
    """The next attempt starts after a pause."""
    STOPPING = "Stopping"
    """The job has ended; its last pods are still being stopped."""
    RESTARTING = "Restarting"
    """The gang failed; the old attempt is being removed before the next one starts."""
    COMPLETED = "Completed"
    """The stage is done."""
    SKIPPED = "Skipped"
    """The job does not ask for this stage."""
    FINDING = "Finding"
    """Of events: a rule or preflight found something; the message begins with the rule's id."""
    FETCH_REFUSED = "FetchRefused"
    """A source does not exist, or the credentials do not open it."""
    PREFLIGHT_REFUSED = "PreflightRefused"
    """Preflight showed with the real model and data that the run cannot work."""
    NOT_REHEARSED = "NotRehearsed"
    """No scaled-down model could be made, or time or memory ran out; what was seen until then was right."""
    REHEARSAL_FAILED = "RehearsalFailed"
    """On a scaled-down model the job failed, or went wrong without an error."""
    PUBLISH_REFUSED = "PublishRefused"
    """The results could not be published, for whatever cause the message names; they are kept on the workspace."""
    FETCH_STOPPED = "FetchStopped"
    """The sources could not be fetched for a cause that the message names."""
    PREFLIGHT_STOPPED = "PreflightStopped"
    """Preflight could not be run to its end for a cause that the message names."""
    MERGE_STOPPED = "MergeStopped"
    """The merge failed for a cause that the message names; what was trained is kept on the workspace."""
    TRAIN_STOPPED = "TrainStopped"
    """Training cannot continue for a cause that is not the job's; its checkpoints are kept on the workspace."""
    TOO_COMPLEX = "TooComplex"
    """Checking the manifest took longer than the operator allows."""
    FAILED = "Failed"
    """The job failed for good; the message names the cause."""
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    """The job failed more often than `spec.run.maxRestarts`, or the limit of its failure class, allows."""
    VERIFICATION_FAILED = "VerificationFailed"
    """The merged model does not behave as base and adapter do; it is not published."""
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    """The pods had a node, and did not all start within `spec.run.startupDeadlineSeconds`."""
    ACTIVE_DEADLINE_EXCEEDED = "ActiveDeadlineExceeded"
    """The job was active for longer than `spec.run.activeDeadlineSeconds`."""
    STALL_DEADLINE_EXCEEDED = "StallDeadlineExceeded"
    """The pods run, and the training made no progress for `run.stallDeadlineSeconds`."""
    PLAN_LOST = "PlanLost"
    """The ConfigMap with the frozen plan is gone or holds other content."""
    CONFLICT = "Conflict"
    """An object with the name that a child needs exists and is not ours."""
    CANCELLED = "Cancelled"
    """The job ended because `spec.run.cancel` is true."""
    SUSPENDED_BY_USER = "SuspendedByUser"
    """`spec.run.suspend` is true; checkpoints are kept."""
    NOT_SUSPENDED = "NotSuspended"
    """`spec.run.suspend` is false."""
    HEALTHY = "Healthy"
    """Nothing needs a human."""
