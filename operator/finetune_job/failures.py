"""Failure classes, the exit codes that represent them, and the report that a container leaves as its termination message.

The trainer raises and exits with these; the operator reads them back. The operator's restart policy alone decides which failures
are retried.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from finetune_job.finding import Finding

TERMINATION_LIMIT_BYTES = 4096
"""Maximum size of a report: the kubelet keeps only the last 4,096 bytes of a termination message, and cuts off the rest."""


class FailureClass(StrEnum):
    """Why a container ended without success."""

    USER_CONFIG = "UserConfig"
    """A setting cannot work; the message says which one, and what to write instead."""
    USER_DATA = "UserData"
    """The data set is missing, empty or malformed."""
    USER_MODEL = "UserModel"
    """The base model is missing, damaged or of a kind that is not accepted."""
    NON_FINITE = "NonFinite"
    """The loss or the gradient norm became NaN or infinite."""
    DEVICE_OUT_OF_MEMORY = "DeviceOutOfMemory"
    """A rank ran out of GPU memory."""
    DEVICE_FAULT = "DeviceFault"
    """A GPU computes wrong results or reports a hardware fault, such as uncorrectable memory errors."""
    HOST_OUT_OF_MEMORY = "HostOutOfMemory"
    """A pod exceeded its memory, and the kernel killed one of its processes."""
    DISK_FULL = "DiskFull"
    """A claim or the disk of the node has no space left."""
    COLLECTIVE = "Collective"
    """A collective operation failed or timed out, most often because another rank had failed before."""
    STALLED = "Stalled"
    """A rank stopped making progress; the stacks of all ranks are on the workspace."""
    SOURCE_UNAVAILABLE = "SourceUnavailable"
    """A hub or an object store did not answer, or gave an unexpected answer; trying again may help."""
    DESTINATION_REFUSED = "DestinationRefused"
    """The destination refused the results: fix the credentials, the name, or what the destination already holds."""
    DESTINATION_UNAVAILABLE = "DestinationUnavailable"
    """The destination did not answer, or the connection broke; trying again may help, and resumes the upload."""
    CHECKPOINT_INVALID = "CheckpointInvalid"
    """No intact checkpoint is left from which training could resume."""
    PLAN_MISMATCH = "PlanMismatch"
    """The plan file does not have the digest that the operator passed to the container."""
    VERIFICATION_FAILED = "VerificationFailed"
    """The merged model does not behave as base and adapter do."""
    PREEMPTED = "Preempted"
    """SIGTERM arrived; the state was saved at a step boundary if time allowed."""
    INFRASTRUCTURE = "Infrastructure"
    """The pod was evicted, deleted or lost with its node; never an exit code."""
    NODE_LOST = "NodeLost"
    """The node of a pod stopped answering; never an exit code."""
    REJECTED = "Rejected"
    """The kubelet rejected the pod (`UnexpectedAdmissionError`, `OutOfcpu`, ...); never an exit code."""
    IMAGE_PULL = "ImagePull"
    """The container's image could not be pulled; never an exit code."""
    MOUNT = "Mount"
    """A volume, Secret or ConfigMap that the pod needs is missing or could not be mounted; never an exit code."""
    ADMISSION = "Admission"
    """The API server refused a Job or its pods: a quota, Pod Security, an admission webhook; never an exit code."""
    INTERNAL = "Internal"
    """Any error that has no class of its own."""
    UNKNOWN = "Unknown"
    """The container left no evidence of the cause; never an exit code."""


USER_FAILURES = frozenset({FailureClass.USER_CONFIG, FailureClass.USER_DATA, FailureClass.USER_MODEL})
"""Failures that only a person can fix: in the manifest, in the data or in the model. Trying again does not help."""

PROCESS_FAILURES = frozenset({FailureClass.COLLECTIVE, FailureClass.INTERNAL, FailureClass.STALLED})
"""Failures that end processes but do no harm to the pod's node, devices and volumes."""

EXIT_CODES: dict[FailureClass, int] = {
    FailureClass.USER_CONFIG: 40,
    FailureClass.USER_DATA: 41,
    FailureClass.USER_MODEL: 42,
    FailureClass.NON_FINITE: 43,
    FailureClass.DEVICE_OUT_OF_MEMORY: 44,
    FailureClass.HOST_OUT_OF_MEMORY: 45,
    FailureClass.DISK_FULL: 46,
    FailureClass.COLLECTIVE: 47,
    FailureClass.CHECKPOINT_INVALID: 48,
    FailureClass.PLAN_MISMATCH: 49,
    FailureClass.PREEMPTED: 50,
    FailureClass.VERIFICATION_FAILED: 51,
    FailureClass.INTERNAL: 52,
    FailureClass.STALLED: 53,
    FailureClass.SOURCE_UNAVAILABLE: 54,
    FailureClass.DESTINATION_REFUSED: 55,
    FailureClass.DESTINATION_UNAVAILABLE: 56,
    FailureClass.DEVICE_FAULT: 57,
}
CLASS_OF_EXIT_CODE = {code: failure for failure, code in EXIT_CODES.items()}


class Outcome(StrEnum):
    """How a container ended, according to its own report."""

    SUCCEEDED = "Succeeded"
    REFUSED = "Refused"
    """Preflight found settings or data that cannot work."""
    FAILED = "Failed"


Count = Annotated[int, Field(ge=0, le=2**53)]
"""A number in a container's report, limited to integers that every JSON parser reads exactly."""
LATEST_TIME = 253_402_300_799.0
"""The last second of the year 9999, the latest time that Python's datetime can represent."""


MOST_RESTARTS_IN_POD = 2
"""Maximum number of times that the ranks of a one-pod gang are restarted in their pod; after that, the pod itself is suspect."""


class RankRestart(BaseModel):
    """A restart of the ranks of a one-pod gang within their pod, after a failure that only affected processes."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)
    failure: FailureClass
    message: str = ""
    rank: Count | None = None
    """Global rank that failed first."""
    step: Count | None = None
    time: Annotated[float, Field(le=LATEST_TIME, allow_inf_nan=False)] = 0.0
    """Seconds since the epoch at which the failure was seen."""


_LEFT_OUT: Any = {"findings": {"__all__": {"changes"}}}
"""Fields that only the full report contains, because the termination message has to be short."""


class TerminationReport(BaseModel):
    """The report of a container that ends: shortened in its termination message, and in full on the workspace."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)
    role: str
    attempt: Count = 0
    outcome: Outcome
    failure: FailureClass | None = None
    message: str = ""
    hint: str = ""
    rank: Count | None = None
    """Global rank that failed first; None if the supervisor itself reports."""
    node_rank: Count | None = None
    step: Count | None = None
    exception: str = ""
    time: Annotated[float, Field(le=LATEST_TIME, allow_inf_nan=False)] = 0.0
    """Seconds since the epoch at which the failure was seen; the earliest report of a gang names the cause."""
    findings: list[Finding] = Field(default_factory=list)
    findings_total: int = 0
    """Number of all findings; `findings` may hold fewer."""
    facts: dict[str, str] = Field(default_factory=dict)
    """Small results that the operator copies into status: digests, paths, losses."""
    restarts: list[RankRestart] = Field(default_factory=list)
    """Restarts of the ranks within their pod during this attempt."""
    report_path: str = ""
    """Path of the full report, relative to the claim that holds the workspace."""

    def envelope(self) -> str:
        """Return this report as JSON within `TERMINATION_LIMIT_BYTES` bytes. To fit, drop the last findings, then cut texts."""
        report = self
        text_limit = 1024
        while True:
            encoded = report.model_dump_json(exclude_defaults=True, exclude_none=True, exclude=_LEFT_OUT)
            if len(encoded.encode()) <= TERMINATION_LIMIT_BYTES:
                return encoded
            total = max(report.findings_total, len(report.findings))
            if len(report.findings) > 1:
                report = report.model_copy(update={"findings": report.findings[:-1], "findings_total": total})
            else:
                text_limit //= 2
                report = report.model_copy(
                    update={
                        "message": report.message[:text_limit],
                        "hint": report.hint[:text_limit],
                        "exception": report.exception[-text_limit:],
                        "report_path": report.report_path[:text_limit],
                        "role": report.role[:text_limit],
                        "findings": [finding.shortened(text_limit) for finding in report.findings],
                        "restarts": [
                            restart.model_copy(update={"message": restart.message[:text_limit]})
                            for restart in report.restarts[:MOST_RESTARTS_IN_POD]
                        ],
                        "findings_total": total,
                        "facts": {
                            key[:64]: value[:text_limit] for key, value in list(report.facts.items())[: max(text_limit // 16, 1)]
                        },
                    }
                )


def parse_envelope(text: str) -> TerminationReport | None:
    """Parse the report in a termination message; None if the message is not such a report."""
    try:
        return TerminationReport.model_validate_json(text)
    except ValueError:
        return None
