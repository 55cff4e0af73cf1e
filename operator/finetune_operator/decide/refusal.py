"""A role that a human has to help: the job is stalled, not failed, and `spec.run.retry` has the role look again.

What is wrong lies in a Secret, on a hub or on a claim as often as in the manifest, and the frozen plan may well be right.
"""

from __future__ import annotations

from collections.abc import Sequence

from finetune_job.api.status import FineTuneJobStatus, StatusFinding
from finetune_job.failures import USER_FAILURES, ReportedFinding
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_job.status.conditions import find
from finetune_operator.decide.classify import Failure
from finetune_operator.decide.draft import TEXT_LIMIT, Draft
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.stage import ATTEMPT_FIELD, CONDITION
from finetune_operator.decide.validate_stage import FINDINGS_LIMIT

REFUSED = {
    Role.FETCH: Reason.FETCH_REFUSED,
    Role.PREFLIGHT: Reason.PREFLIGHT_REFUSED,
    Role.PUBLISH: Reason.PUBLISH_REFUSED,
}
_WHAT_TO_DO = {
    Role.FETCH: "Mend the source or the Secret and raise spec.run.retry, or apply a corrected manifest as a new job.",
    Role.PREFLIGHT: "Mend the files and raise spec.run.retry, or apply a corrected manifest as a new job.",
    Role.PUBLISH: "Mend the cause and raise spec.run.retry; the results are kept on the workspace.",
}


def was_refused(status: FineTuneJobStatus) -> bool:
    """Whether a role has refused the job and nobody has asked for another look. Only then is `spec.run.retry` kept for later."""
    conditions = {role: find(status.conditions, CONDITION[role]) for role in REFUSED}
    return any(condition is not None and condition.reason == REFUSED[role] for role, condition in conditions.items())


def refuse(observed: Observed, draft: Draft, role: Role, failure: Failure) -> None:
    """Stall the job with the findings of this role."""
    findings = failure.findings or (
        ReportedFinding(
            rule=f"{role}/{failure.failure}", severity="error", message=failure.message or str(failure.failure), fix=failure.hint
        ),
    )
    draft.find(with_reported(observed, findings, role))
    errors = [finding for finding in findings if finding.severity == "error"] or list(findings)
    place = f"{errors[0].field}: " if errors[0].field else ""
    message = f"{errors[0].rule}: {place}{errors[0].message} {errors[0].fix} {_WHAT_TO_DO[role]}"
    draft.condition(CONDITION[role], False, REFUSED[role], message)
    draft.stall(REFUSED[role], message)


def refused_by_user(stage: RoleStage, failure: Failure) -> bool:
    """Stall the job where a human has to mend what failed. False: it is a failure like others."""
    if not (failure.refused or failure.failure in USER_FAILURES):
        return False
    refuse(stage.observed, stage.draft, stage.role, failure)
    return True


def wait_for_retry(stage: RoleStage) -> bool:
    """Rest while the role's refusal stands, and begin its next attempt once `spec.run.retry` is raised. False: not refused."""
    observed, draft, role = stage.observed, stage.draft, stage.role
    job = observed.job
    before = find(job.status.conditions, CONDITION[role])
    if before is None or before.reason != REFUSED[role]:
        return False
    if job.spec is None or job.spec.run.retry <= job.status.retry_handled:
        draft.stall(REFUSED[role], before.message)
        return True
    draft.set(**{ATTEMPT_FIELD[role]: stage.attempt + 1}, retry_handled=job.spec.run.retry, findings=_warnings(observed))
    said = f"spec.run.retry is {job.spec.run.retry}: {role} runs again."
    stage.say(Reason.RESTARTING, said)
    draft.condition(ConditionType.READY, False, Reason.RESTARTING)
    draft.emit("Normal", Reason.RESTARTING, said)
    earlier = observed.batch_job(role, stage.attempt)
    if earlier is not None:
        draft.delete(earlier)
    return True


def _warnings(observed: Observed) -> list[StatusFinding]:
    return [finding for finding in observed.job.status.findings if finding.severity == "warning"]


def with_reported(observed: Observed, reported: Sequence[ReportedFinding], role: Role) -> list[StatusFinding]:
    """What a role found, after the warnings of the rule book, none twice."""
    found = [
        StatusFinding(
            rule=finding.rule[:128],
            severity="error" if finding.severity == "error" else "warning",
            field=finding.field[:TEXT_LIMIT],
            value=finding.value[:TEXT_LIMIT],
            message=finding.message[:TEXT_LIMIT],
            fix=finding.fix[:TEXT_LIMIT],
            source=(finding.source or str(role))[:TEXT_LIMIT],
        )
        for finding in reported
    ]
    fresh = {(finding.rule, finding.field) for finding in found}
    kept = [finding for finding in _warnings(observed) if (finding.rule, finding.field) not in fresh]
    errors = [finding for finding in found if finding.severity == "error"]
    return [*errors, *kept, *(finding for finding in found if finding.severity == "warning")][:FINDINGS_LIMIT]
