"""Condition types and reasons: every word that may stand in `status.conditions`, in events and in metric labels."""

from enum import StrEnum


class ConditionType(StrEnum):
    """Condition types, the stages first and in order, the summaries after them."""

    VALIDATED = "Validated"
    """The manifest and its profile pass every rule, and the plan is frozen."""
    FETCHED = "Fetched"
    """Model and data from outside the cluster are on the workspace."""
    PREPARED = "Prepared"
    """Preflight accepted the model, the data and the settings."""
    TRAINED = "Trained"
    """The last optimizer step is done and the trained weights are on the workspace."""
    MERGED = "Merged"
    """The merged model exists and passed its verification."""
    PUBLISHED = "Published"
    """The results are where `output.destination` says."""
    READY = "Ready"
    """Accepted, and its pods are placed."""
    SUCCEEDED = "Succeeded"
    FINISHED = "Finished"
    """Terminal either way."""
    STALLED = "Stalled"
    """Nothing goes on until a human acts."""
    SUSPENDED = "Suspended"


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

    NOT_OBSERVED = "NotObserved"
    """First sight of the object."""
    ACCEPTED = "Accepted"
    REFUSED = "Refused"
    """A rule refused the manifest; `status.findings` names field, value, reason and fix."""
    INVALID_SPEC = "InvalidSpec"
    """The manifest does not have the shape of a FineTuneJob."""
    PROFILE_NOT_FOUND = "ProfileNotFound"
    PROFILE_INVALID = "ProfileInvalid"
    CLAIM_NOT_FOUND = "ClaimNotFound"
    PENDING = "Pending"
    """The stage before it is not done."""
    RUNNING = "Running"
    WAITING_FOR_PODS = "WaitingForPods"
    RESTARTING = "Restarting"
    """The gang failed; the old attempt is being removed before the next one starts."""
    COMPLETED = "Completed"
    SKIPPED = "Skipped"
    """The job does not ask for this stage."""
    FINDING = "Finding"
    """Of events: a rule or preflight found something; the message begins with the rule's id."""
    FETCH_REFUSED = "FetchRefused"
    """A source does not exist, or the credentials do not open it."""
    PREFLIGHT_REFUSED = "PreflightRefused"
    """Preflight showed with the real model and data that the run cannot work."""
    PUBLISH_REFUSED = "PublishRefused"
    """The results could not be published, for whatever cause the message names; they are kept on the workspace."""
    FAILED = "Failed"
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    VERIFICATION_FAILED = "VerificationFailed"
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    ACTIVE_DEADLINE_EXCEEDED = "ActiveDeadlineExceeded"
    PLAN_LOST = "PlanLost"
    """The ConfigMap with the frozen plan is gone or holds other content."""
    CONFLICT = "Conflict"
    """An object with the name that a child needs exists and is not ours."""
    CANCELLED = "Cancelled"
    SUSPENDED_BY_USER = "SuspendedByUser"
    NOT_SUSPENDED = "NotSuspended"
    HEALTHY = "Healthy"
    """Nothing needs a human."""
