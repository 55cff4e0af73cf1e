"""The status of a job as the API server stores it: readable no matter which release wrote it, and small enough for etcd.

An operator may be upgraded or rolled back while jobs run. A field that an earlier release did not write is read as that release
meant it. Enum values of a later release are left out or replaced by the nearest known value, because a job whose status cannot be
read would be abandoned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune_job.api.status import Condition, FineTuneJobStatus
from finetune_job.conditions import find_condition
from finetune_job.failures import FailureClass
from finetune_job.finding import TEXTS, Finding
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason

_CONDITIONS = frozenset(map(str, ConditionType))
_ROLES = frozenset(map(str, Role))
_FAILURES = frozenset(map(str, FailureClass))
_OUTCOMES = frozenset(map(str, AttemptOutcome))
_NOT_BEGUN = (Reason.NOT_OBSERVED, Reason.PENDING)
MAX_FINDINGS_BYTES = 256 << 10
"""Maximum size of all findings together. Attempts take at most the same again, because only the latest keeps all details."""
MIN_TEXT_LENGTH = 64


def read_status(content: dict[str, Any] | None) -> FineTuneJobStatus:
    """Read `status` of a FineTuneJob. Raises pydantic.ValidationError for content that no release ever wrote."""
    content = dict(content or {})
    if "conditions" in content:
        content["conditions"] = [item for item in content["conditions"] if item.get("type") in _CONDITIONS]
    if "attempts" in content:
        content["attempts"] = [_known_attempt(item) for item in content["attempts"] if item.get("role", Role.TRAIN) in _ROLES]
    status = FineTuneJobStatus.model_validate(content)
    return status.model_copy(update={"conditions": [*_implied_fetched(status), *status.conditions]})


def _known_attempt(attempt: dict[str, Any]) -> dict[str, Any]:
    """Return the record of an attempt with only values that this release knows."""
    evidence = [_with_known_failure(fact) for fact in attempt.get("evidence") or ()]
    outcome = attempt.get("outcome", str(AttemptOutcome.RUNNING))
    return _with_known_failure(attempt) | {
        "evidence": evidence,
        "outcome": outcome if outcome in _OUTCOMES else str(AttemptOutcome.FAILED),
    }


def _with_known_failure(record: dict[str, Any]) -> dict[str, Any]:
    failure = record.get("failure")
    return record if failure is None or failure in _FAILURES else record | {"failure": str(FailureClass.UNKNOWN)}


def _implied_fetched(status: FineTuneJobStatus) -> list[Condition]:
    """Derive the condition `Fetched`, which the first releases lacked: they read only from claims, and began with preflight."""
    prepared = find_condition(status.conditions, ConditionType.PREPARED)
    if prepared is None or find_condition(status.conditions, ConditionType.FETCHED) is not None:
        return []
    has_begun = prepared.reason not in _NOT_BEGUN
    fetched = prepared.model_copy(
        update={
            "type": ConditionType.FETCHED,
            "status": "True" if has_begun else "Unknown",
            "reason": str(Reason.SKIPPED) if has_begun else prepared.reason,
            "message": "Model and data are on claims." if has_begun else "",
        }
    )
    return [fetched]


def with_short_findings(status: FineTuneJobStatus) -> FineTuneJobStatus:
    """Return the status; if its findings are too large in total, their texts are shortened."""
    limit = max((len(text) for finding in status.findings for text in _texts(finding)), default=0)
    findings: Sequence[Finding] = status.findings
    while limit > MIN_TEXT_LENGTH and _bytes(findings) > MAX_FINDINGS_BYTES:
        limit //= 2
        findings = [finding.shortened(limit) for finding in status.findings]
    return status if findings is status.findings else status.model_copy(update={"findings": findings})


def _texts(finding: Finding) -> tuple[str, ...]:
    return tuple(getattr(finding, name) for name in TEXTS)


def _bytes(findings: Sequence[Finding]) -> int:
    return sum(len(text.encode(errors="surrogatepass")) for finding in findings for text in _texts(finding))
