"""The stages before training, which need no accelerator: fetch copies the model and data to the workspace, and preflight checks
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pydantic import TypeAdapter, ValidationError

from finetune_job.api.status import MemoryStatus, PlanChoice
from finetune_job.catalogue.book import rehearsal_required
from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.finding import Finding
from finetune_job.names import Role
from finetune_job.plan.run_plan import Choice
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.cpu_jobs import cpu_job
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.train_job import gated_train_job
from finetune_operator.decide.failures.classify import Failure
from finetune_operator.decide.failures.job_state import JobState, State
from finetune_operator.decide.gang.elastic import gang_nodes
from finetune_operator.decide.gang.rank_restarts import restarts_allowed
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.stage import attempt_of
from finetune_operator.decide.stages.role_stage import RoleStage
from finetune_operator.decide.stages.stopped import renewed_resources, stop_for_user, stop_role, with_reported
from finetune_operator.decide.stages.validate_stage import plan_choice


def fetch_stage(observed: Observed, result: PassResult, run: FrozenRun) -> bool:
    """Handle one pass while fetch is not done. Returns whether the next stage may begin."""
    stage = RoleStage(observed, result, Role.FETCH)

    def succeeded(current: JobState) -> bool:
        result.condition(
            ConditionType.FETCHED, True, Reason.COMPLETED, current.report.message if current.report is not None else ""
        )
        return True

    return stage.drive(
        lambda: cpu_job(run, Role.FETCH, stage.attempt),
        succeeded,
        lambda failure: stop_for_user(observed, result, Role.FETCH, failure),
    )


_PASSED = "Passed"
REHEARSED: dict[str, tuple[bool, Reason]] = {
    _PASSED: (True, Reason.COMPLETED),
    "NotDone": (False, Reason.NOT_REHEARSED),
    "Failed": (False, Reason.REHEARSAL_FAILED),
    "Skipped": (False, Reason.SKIPPED),
}
"""Verdict on the rehearsal that preflight reports -> status and reason of the condition `Rehearsed`."""
_REHEARSAL_FINDINGS = ("rehearsal-failed", "rehearsal-not-done")
_CHOICES = TypeAdapter(tuple[Choice, ...])
_LEFT_TO_PREFLIGHT = "null"
"""Value of a choice that is still to be made by preflight."""
_NUMBER = re.compile(r"[0-9]{1,18}")
"""A number of bytes that fits into 64 bits."""


def preflight_stage(observed: Observed, result: PassResult, run: FrozenRun) -> bool:
    """Handle one pass while the job is not prepared. Returns whether the next stage may begin."""
    stage = RoleStage(observed, result, Role.PREFLIGHT)
    attempt = attempt_of(observed.job.status, Role.TRAIN)
    # If the API server refuses the training Job, it is not retried until preflight ends; only then is a refusal reported.
    may_queue_training = (
        run.placement.queue_during_preflight
        and run.placement.pods.train.queue_name is not None
        and observed.batch_job(Role.TRAIN, attempt) is None
        and observed.refused is None
    )
    if may_queue_training and stage.job_state().state in (State.QUEUED, State.WAITING, State.RUNNING):
        nodes = gang_nodes(run.plan, observed.job.status.gang_nodes)
        result.create(gated_train_job(run, attempt, nodes, restarts_allowed(observed, run)))
        return False

    def refused(failure: Failure) -> bool:
        _set_memory(result, failure.facts)
        if failure.facts.get("rehearsal"):
            _set_rehearsal(result, failure.facts, failure.findings)
        return stop_for_user(observed, result, Role.PREFLIGHT, failure)

    return stage.drive(
        lambda: cpu_job(run, Role.PREFLIGHT, stage.attempt, renewed_resources(observed, Role.PREFLIGHT)),
        lambda current: _preflight_succeeded(observed, result, run, current),
        refused,
    )


def _preflight_succeeded(observed: Observed, result: PassResult, run: FrozenRun, current: JobState) -> bool:
    status, report = observed.job.status, current.report
    facts: Mapping[str, str] = report.facts if report is not None else {}
    _set_memory(result, facts)
    _set_rehearsal(result, facts, report.findings if report is not None else ())
    refusal = _refusal(run, report)
    if refusal is not None:
        stop_role(observed, result, Role.PREFLIGHT, refusal)
        return False
    if report is not None and status.plan is not None:
        result.set(
            plan=status.plan.model_copy(
                update={
                    "model_digest": facts.get("model_digest", ""),
                    "data_hash": facts.get("data_hash", ""),
                    "choices": _with_choices(status.plan.choices, facts),
                }
            )
        )
        result.set(findings=with_reported(observed, report.findings, Role.PREFLIGHT))
    result.condition(ConditionType.PREPARED, True, Reason.COMPLETED, report.message if report is not None else "")
    return True


def _refusal(run: FrozenRun, report: TerminationReport | None) -> Failure | None:
    """Explain why the job is refused although preflight's container succeeded; None if it is not refused."""
    if report is not None and report.outcome is Outcome.REFUSED:
        return Failure(FailureClass.USER_CONFIG, report.message, report.hint, findings=tuple(report.findings))
    rehearsal = report.facts.get("rehearsal", "") if report is not None else ""
    if not run.placement.requires_rehearsal or rehearsal == _PASSED:
        return None
    # Trainer images of earlier releases do not know that a rehearsal may be required.
    finding = rehearsal_required(run.placement.profile, rehearsal if rehearsal in REHEARSED else "not known")
    return Failure(FailureClass.USER_CONFIG, finding.message, finding.fix, findings=(finding,))


def _set_rehearsal(result: PassResult, facts: Mapping[str, str], findings: Sequence[Finding]) -> None:
    """Set the condition `Rehearsed` from the report of preflight's container."""
    verdict = facts.get("rehearsal", "")
    is_passed, reason = REHEARSED.get(verdict, (None, Reason.NOT_OBSERVED))
    since = facts.get("rehearsal_kept_since", "")
    if is_passed:
        message = f"Passed on this claim before, at {since}." if since else f"Passed in {facts.get('rehearsal_seconds', '?')} s."
    elif reason is Reason.SKIPPED:
        message = "spec.preflight.rehearsal is Skip."
    elif reason is Reason.NOT_OBSERVED:
        message = "Preflight did not report it."
    else:
        message = next((finding.message for finding in findings if finding.rule in _REHEARSAL_FINDINGS), "")
    result.condition(ConditionType.REHEARSED, is_passed, reason, message)


def _with_choices(choices: list[PlanChoice], facts: Mapping[str, str]) -> list[PlanChoice]:
    """Fill in the choices that were left to preflight. A container may also report malformed choices, or choices for other
    fields; these are ignored.
    """
    chosen: dict[str, PlanChoice] = {}
    for fact in (f"[{facts.get('resharding', '')}]", facts.get("batches", "")):
        with suppress(ValidationError):
            chosen |= {choice.field: plan_choice(choice) for choice in _CHOICES.validate_json(fact)}
    return [chosen.get(choice.field, choice) if choice.value == _LEFT_TO_PREFLIGHT else choice for choice in choices]


def _set_memory(result: PassResult, facts: Mapping[str, str]) -> None:
    """Record preflight's memory estimate, if there is one. A container reports it, so it need not be a number."""
    estimate, limit = facts.get("memory_estimate", ""), facts.get("memory_limit", "")
    if _NUMBER.fullmatch(estimate):
        result.set(memory=MemoryStatus(estimate=int(estimate), limit=int(limit) if _NUMBER.fullmatch(limit) else None))
