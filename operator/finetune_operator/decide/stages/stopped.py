"""Roles that need a human: the job is stalled, not failed, and increasing `spec.run.retry` makes the role try again.

The cause is as likely to be in a Secret, on a hub or on a claim as in the manifest, so the frozen plan may well be right.
"""

from __future__ import annotations

from collections.abc import Sequence

from finetune_job.api.profile import RoleResources
from finetune_job.api.status import FineTuneJobStatus, Restarts
from finetune_job.conditions import find_condition
from finetune_job.failures import USER_FAILURES
from finetune_job.finding import MAX_TEXT_LENGTH, Finding
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason
from finetune_operator.decide.failures.classify import Failure
from finetune_operator.decide.gang.attempts import closed, with_restarts
from finetune_operator.decide.pass_result import FINDINGS_LIMIT, PassResult
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.stage import ATTEMPT_FIELD, CONDITION, attempt_of
from finetune_operator.decide.stages.finish import stop_running

REFUSED = {
    Role.FETCH: Reason.FETCH_REFUSED,
    Role.PREFLIGHT: Reason.PREFLIGHT_REFUSED,
    Role.TRAIN: Reason.TRAIN_STOPPED,
    Role.MERGE: Reason.MERGE_STOPPED,
    Role.PUBLISH: Reason.PUBLISH_REFUSED,
}
"""Role -> reason in status if the role stopped because it found an error in the job."""
STOPPED = {**REFUSED, Role.FETCH: Reason.FETCH_STOPPED, Role.PREFLIGHT: Reason.PREFLIGHT_STOPPED}
"""Role -> reason in status if the role stopped for any other cause."""
_WHAT_TO_DO = {
    Role.FETCH: "Fix the source or the Secret and increase spec.run.retry, or apply a corrected manifest as a new job.",
    Role.PREFLIGHT: "Fix the cause and increase spec.run.retry, or apply a corrected manifest as a new job.",
    Role.TRAIN: "Fix the cause and increase spec.run.retry; the checkpoints are kept on the workspace.",
    Role.MERGE: "Fix the cause and increase spec.run.retry; what was trained is kept on the workspace.",
    Role.PUBLISH: "Fix the cause and increase spec.run.retry; the results are kept on the workspace.",
}


def is_stopped(status: FineTuneJobStatus, role: Role) -> bool:
    """Whether a role has stopped and waits for `spec.run.retry`."""
    condition = find_condition(status.conditions, CONDITION[role])
    return condition is not None and condition.reason in (REFUSED[role], STOPPED[role])


def awaits_retry(status: FineTuneJobStatus) -> bool:
    """Whether any role has stopped and waits for `spec.run.retry`. Only then may an increase of that field be pending."""
    stalled = find_condition(status.conditions, ConditionType.STALLED)
    waits = stalled is not None and stalled.status == "True" and stalled.reason == Reason.STARTUP_DEADLINE_EXCEEDED
    return waits or any(is_stopped(status, role) for role in REFUSED)


def stop_role(observed: Observed, result: PassResult, role: Role, failure: Failure) -> None:
    """Stop the role: stall the job, report the role's findings, and delete the Jobs that are still running."""
    findings = failure.findings or (
        Finding(
            rule=f"{role}/{failure.failure}", severity="error", message=failure.message or str(failure.failure), fix=failure.hint
        ),
    )
    result.set(findings=with_reported(observed, findings, role))
    errors = [finding for finding in findings if finding.severity == "error"] or list(findings)
    place = f"{errors[0].field}: " if errors[0].field else ""
    cause = f"{errors[0].rule}: {place}{errors[0].message} {errors[0].fix}".rstrip()
    message = f"{cause}{'' if cause.endswith('.') else '.'} {_WHAT_TO_DO[role]}"
    if not result.has_value("attempts"):
        status, failed = observed.job.status, AttemptOutcome.FAILED
        result.set(attempts=closed(status, role, attempt_of(status, role), failed, result.now, failure=failure))
    reason = REFUSED[role] if _is_verdict(failure) else STOPPED[role]
    result.condition(CONDITION[role], False, reason, message)
    result.stall(reason, message)
    # Waiting pods, and Jobs that wait in a queue, hold resources that other jobs could use.
    stop_running(observed, result)


def stop_for_user(observed: Observed, result: PassResult, role: Role, failure: Failure) -> bool:
    """Stall the job if only a human can fix the failure. Returns whether the job was stalled."""
    if not _is_verdict(failure):
        return False
    stop_role(observed, result, role, failure)
    return True


def _is_verdict(failure: Failure) -> bool:
    return failure.refused or failure.failure in USER_FAILURES


def wait_for_retry(observed: Observed, result: PassResult, role: Role) -> bool:
    """Wait while the role is stopped, and begin its next attempt once `spec.run.retry` is increased. Returns whether the role was
    stopped.
    """
    job = observed.job
    before = find_condition(job.status.conditions, CONDITION[role])
    if before is None or not is_stopped(job.status, role):
        return False
    if not start_next_attempt(observed, result, role):
        result.stall(Reason(before.reason), before.message)
    return True


def start_next_attempt(observed: Observed, result: PassResult, role: Role) -> bool:
    """If `spec.run.retry` was increased, begin the role's next attempt and reset its restarts. Returns whether it began."""
    job = observed.job
    if job.spec is None or job.spec.run.retry <= job.status.retry_handled:
        return False
    attempt = attempt_of(job.status, role)
    message = f"spec.run.retry is {job.spec.run.retry}: {role} runs again."
    result.set(
        **{ATTEMPT_FIELD[role]: attempt + 1},
        **with_restarts(job.status, role, Restarts()),
        retry_handled=job.spec.run.retry,
        gang_nodes=None if role is Role.TRAIN else job.status.gang_nodes,
        findings=_warnings(observed),
    )
    result.condition(CONDITION[role], None, Reason.RESTARTING, message)
    if role is Role.PREFLIGHT:
        result.condition(ConditionType.REHEARSED, None, Reason.PENDING)
    result.condition(ConditionType.READY, False, Reason.RESTARTING)
    result.emit("Normal", Reason.RESTARTING, message)
    earlier = observed.batch_job(role, attempt)
    if earlier is not None:
        result.delete(earlier)
    return True


def renewed_resources(observed: Observed, role: Role) -> RoleResources | None:
    """Resources of a CPU role: those of the current profile once the user has asked for a retry; None for those of the plan.

    With the resources of the frozen plan, a merge that ran out of memory could never succeed.
    """
    profile = observed.profile.spec
    if profile is None or not observed.job.status.retry_handled:
        return None
    resources: RoleResources = getattr(profile.resources, role.value)
    return resources


def _warnings(observed: Observed) -> list[Finding]:
    return [finding for finding in observed.job.status.findings if finding.severity == "warning"]


def with_reported(observed: Observed, reported: Sequence[Finding], role: Role) -> list[Finding]:
    """Merge the findings of a role with the warnings of the rule book, without duplicates."""
    shortened = [
        finding.shortened(MAX_TEXT_LENGTH).model_copy(update={"source": finding.source[:MAX_TEXT_LENGTH] or str(role)})
        for finding in reported
    ]
    fresh = {(finding.rule, finding.field) for finding in shortened}
    kept = [finding for finding in _warnings(observed) if (finding.rule, finding.field) not in fresh]
    errors = [finding for finding in shortened if finding.severity == "error"]
    return [*errors, *kept, *(finding for finding in shortened if finding.severity == "warning")][:FINDINGS_LIMIT]
