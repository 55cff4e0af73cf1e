"""Preflight: the real model and data are looked at on the CPU before an accelerator is taken."""

from __future__ import annotations

from finetune_job.api.status import FineTuneJobStatus, StatusFinding
from finetune_job.failures import FailureClass, Outcome, ReportedFinding
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_job.status.conditions import find
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.preflight_job import preflight_job
from finetune_operator.decide.classify import Failure
from finetune_operator.decide.draft import TEXT_LIMIT, Draft
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.standing import Standing, State, standing
from finetune_operator.decide.validate_stage import FINDINGS_LIMIT

_USER_FAILURES = frozenset({FailureClass.USER_CONFIG, FailureClass.USER_DATA, FailureClass.USER_MODEL})
"""Failures that a human can mend on the claims; `spec.run.retry` then runs preflight again with the same plan."""


def was_refused(status: FineTuneJobStatus) -> bool:
    """Whether preflight has refused the job and nobody has asked for another look. Only then is `spec.run.retry` kept for later."""
    prepared = find(status.conditions, ConditionType.PREPARED)
    return prepared is not None and prepared.reason == Reason.PREFLIGHT_REFUSED


def preflight_stage(observed: Observed, draft: Draft, run: FrozenRun) -> None:
    """One pass while the job is not prepared."""
    job = observed.job
    stage = RoleStage(observed, draft, Role.PREFLIGHT)
    before = find(job.status.conditions, ConditionType.PREPARED)
    if before is not None and was_refused(job.status):
        _refused_before(observed, draft, stage, before.message)
        return
    was_seen = before is not None and before.reason == Reason.RUNNING
    stands = standing(observed, Role.PREFLIGHT, stage.attempt, 1, was_seen=was_seen, now=draft.now)
    if stands.batch_job is None and stands.failure is None:
        stage.create(lambda: [preflight_job(run, stage.attempt)])
    elif stands.state is State.SUCCEEDED:
        _succeeded(observed, draft, stands)
    elif stands.failure is not None and (stands.failure.refused or stands.failure.failure in _USER_FAILURES):
        _refuse(observed, draft, stands.failure)
    elif stands.failure is not None:
        stage.fail(stands.failure, stands.batch_job)
    elif stands.batch_job is not None:
        stage.wait(stands, stands.batch_job)


def _succeeded(observed: Observed, draft: Draft, stands: Standing) -> None:
    status, report = observed.job.status, stands.report
    if report is not None and report.outcome is Outcome.REFUSED:
        _refuse(observed, draft, Failure(FailureClass.USER_CONFIG, report.message, report.hint, findings=tuple(report.findings)))
        return
    if report is not None and status.plan is not None:
        facts = report.facts
        draft.set(
            plan=status.plan.model_copy(
                update={"model_digest": facts.get("model_digest", ""), "data_hash": facts.get("data_hash", "")}
            ),
            findings=_with_reported(observed, report.findings),
        )
    draft.condition(ConditionType.PREPARED, True, Reason.COMPLETED, report.message if report is not None else "")
    draft.condition(ConditionType.READY, False, Reason.PENDING)


def _refuse(observed: Observed, draft: Draft, failure: Failure) -> None:
    """Stalled, not failed: what is wrong lies on the claims as often as in the manifest."""
    findings = failure.findings or (
        ReportedFinding(
            rule=f"preflight/{failure.failure}", severity="error", message=failure.message or str(failure.failure), fix=failure.hint
        ),
    )
    draft.set(findings=_with_reported(observed, findings))
    errors = [finding for finding in findings if finding.severity == "error"] or list(findings)
    place = f"{errors[0].field}: " if errors[0].field else ""
    message = (
        f"{place}{errors[0].message} {errors[0].fix} "
        "Mend the files and raise spec.run.retry, or apply a corrected manifest as a new job."
    )
    draft.condition(ConditionType.PREPARED, False, Reason.PREFLIGHT_REFUSED, message)
    draft.stall(Reason.PREFLIGHT_REFUSED, message)


def _refused_before(observed: Observed, draft: Draft, stage: RoleStage, message: str) -> None:
    """Wait for a human; `spec.run.retry` starts the next attempt with the same plan."""
    job = observed.job
    if job.spec is None or job.spec.run.retry <= job.status.retry_handled:
        draft.stall(Reason.PREFLIGHT_REFUSED, message)
        return
    draft.set(preflight_attempt=stage.attempt + 1, retry_handled=job.spec.run.retry, findings=_warnings(observed))
    stage.say(Reason.RESTARTING, f"spec.run.retry is {job.spec.run.retry}: preflight runs again.")
    draft.condition(ConditionType.READY, False, Reason.RESTARTING)
    draft.emit("Normal", Reason.RESTARTING, f"spec.run.retry is {job.spec.run.retry}: preflight runs again.")
    earlier = observed.batch_job(Role.PREFLIGHT, stage.attempt)
    if earlier is not None:
        draft.delete(earlier)


def _warnings(observed: Observed) -> list[StatusFinding]:
    return [finding for finding in observed.job.status.findings if finding.severity == "warning"]


def _with_reported(observed: Observed, reported: list[ReportedFinding] | tuple[ReportedFinding, ...]) -> list[StatusFinding]:
    """What preflight found, after the warnings of the rule book, none twice."""
    found = [
        StatusFinding(
            rule=finding.rule[:128],
            severity="error" if finding.severity == "error" else "warning",
            field=finding.field[:TEXT_LIMIT],
            value=finding.value[:TEXT_LIMIT],
            message=finding.message[:TEXT_LIMIT],
            fix=finding.fix[:TEXT_LIMIT],
        )
        for finding in reported
    ]
    fresh = {(finding.rule, finding.field) for finding in found}
    kept = [finding for finding in _warnings(observed) if (finding.rule, finding.field) not in fresh]
    errors = [finding for finding in found if finding.severity == "error"]
    return [*errors, *kept, *(finding for finding in found if finding.severity == "warning")][:FINDINGS_LIMIT]
