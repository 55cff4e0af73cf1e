"""From manifest to frozen plan.

Before the start every pass judges what it sees, so that a job goes on by itself once its profile or claim appears. The freeze
is one status write with the observed resourceVersion as precondition; the plan's ConfigMap and every other child come after it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from finetune_job.api.status import FineTuneJobStatus, PlanChoice, PlanStatus, StatusFinding
from finetune_job.plan.digest import canonical_json, plan_sha256
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan
from finetune_job.reasons import ConditionType, Reason
from finetune_job.rules.book import evaluate
from finetune_job.rules.context import RuleContext
from finetune_job.rules.rule import UNREADABLE, Finding
from finetune_job.status.conditions import find
from finetune_operator.children.claims import claims_named_by, workspace_claim, workspace_claim_of
from finetune_operator.children.ownership import Owner
from finetune_operator.children.plan_configmap import plan_configmap
from finetune_operator.decide.clock import timestamp
from finetune_operator.decide.draft import TEXT_LIMIT, Draft
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.stage import CONDITION, is_started

FINDINGS_LIMIT = 64
LOOK_AGAIN_SECONDS = 30.0
"""For what no watch announces: a claim that somebody creates."""
TOO_COMPLEX_MESSAGE = (
    "spec: checking this manifest took longer than the operator may spend on one job. "
    "Shorten it (lora.rankPattern, lora.alphaPattern and method.settings first), "
    "or increase spec.run.retry to have it checked again."
)


def is_established(status: FineTuneJobStatus) -> bool:
    """Whether the ConfigMap with the frozen plan has been seen; from here on its loss is a loss."""
    first = find(status.conditions, ConditionType.FETCHED)
    return is_started(status) and first is not None and first.reason not in (Reason.NOT_OBSERVED, Reason.PENDING)


def validate_stage(observed: Observed, draft: Draft) -> None:
    """Judge the manifest, freeze the plan, store it."""
    plan = _accepted_plan(observed, draft)
    if plan is None:
        return
    draft.condition(ConditionType.STALLED, False, Reason.HEALTHY)
    draft.condition(ConditionType.FINISHED, False, Reason.RUNNING)
    for stage in CONDITION.values():
        draft.condition(stage, None, Reason.PENDING)
    status = observed.job.status
    digest = plan_sha256(plan)
    if not is_started(status) or status.plan is None or status.plan.hash != digest:
        # A digest that changed between the freeze and the first child means that the profile was edited in that moment:
        # nothing has run, so the newer plan is frozen instead.
        _freeze(observed, draft, plan, digest)
    else:
        _store(observed, draft, plan)


def _accepted_plan(observed: Observed, draft: Draft) -> RunPlan | None:
    """The plan, or None where the job is stalled or suspended."""
    job, profile = observed.job, observed.profile
    if job.spec is None:
        _refuse(draft, Reason.INVALID_SPEC, f"The manifest is not valid: {job.spec_error}")
        draft.find([_invalid(job.spec_error)])
        return None
    if not is_started(job.status) and (observed.too_complex or _was_too_complex(observed)):
        _refuse(draft, Reason.TOO_COMPLEX, TOO_COMPLEX_MESSAGE)
        return None
    if profile.spec is None:
        if profile.error:
            _refuse(draft, Reason.PROFILE_INVALID, f"spec.profile: FineTuneProfile {profile.name!r} is not valid: {profile.error}")
        else:
            _refuse(draft, Reason.PROFILE_NOT_FOUND, f"spec.profile: there is no FineTuneProfile {profile.name!r}. Create it.")
        return None
    findings = evaluate(RuleContext(job.spec, profile.spec))
    draft.find(status_findings(findings))
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        more = f" And {len(errors) - 1} more in status.findings." if len(errors) > 1 else ""
        _refuse(draft, Reason.REFUSED, f"{errors[0].rule}: {errors[0].field}: {errors[0].message} {errors[0].fix}{more}")
        return None
    missing = missing_claims(observed, template_counts=False)
    if missing:
        _refuse(draft, Reason.CLAIM_NOT_FOUND, missing)
        draft.wake_after(LOOK_AGAIN_SECONDS)
        return None
    if job.spec.run.suspend:
        if not is_started(job.status):
            draft.condition(ConditionType.VALIDATED, None, Reason.SUSPENDED_BY_USER, "Accepted; the plan is frozen on resumption.")
        draft.condition(ConditionType.STALLED, False, Reason.HEALTHY)
        draft.condition(ConditionType.SUSPENDED, True, Reason.SUSPENDED_BY_USER, "spec.run.suspend is true.")
        draft.condition(ConditionType.READY, False, Reason.SUSPENDED_BY_USER)
        return None
    draft.condition(ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED)
    return resolve(JobIdentity(namespace=job.namespace, name=job.name, uid=job.uid), job.spec, profile.spec, profile.name)


def _was_too_complex(observed: Observed) -> bool:
    """Whether this generation is refused for it already: an operator that restarts does not try again."""
    validated = find(observed.job.status.conditions, ConditionType.VALIDATED)
    is_refused = validated is not None and validated.status == "False" and validated.reason == Reason.TOO_COMPLEX
    return is_refused and validated is not None and validated.observed_generation == observed.job.generation


def _invalid(error: str) -> StatusFinding:
    return StatusFinding(
        rule=UNREADABLE,
        severity="error",
        field="spec",
        message=f"The manifest is not valid: {error}"[:TEXT_LIMIT],
        fix="Correct these fields; `finetune validate` names what each of them takes.",
    )


def _refuse(draft: Draft, reason: Reason, message: str) -> None:
    draft.condition(ConditionType.VALIDATED, False, reason, message)
    draft.stall(reason, message)


def _freeze(observed: Observed, draft: Draft, plan: RunPlan, digest: str) -> None:
    image = plan.placement.trainer_image if plan.placement is not None else ""
    draft.set(start_time=observed.job.status.start_time or timestamp(draft.now))
    choices = [PlanChoice(field=one.field, value=json.dumps(one.value)[:TEXT_LIMIT], reason=one.reason) for one in plan.choices]
    draft.set(plan=PlanStatus(hash=digest, trainer_image=image, choices=choices))
    draft.condition(ConditionType.VALIDATED, True, Reason.ACCEPTED, f"Plan {digest[:12]} is frozen.")
    draft.condition(ConditionType.READY, False, Reason.PENDING, "The plan is being stored.")
    draft.emit("Normal", Reason.ACCEPTED, f"Accepted; plan {digest[:12]} is frozen.")


def _store(observed: Observed, draft: Draft, plan: RunPlan) -> None:
    """Create what every stage needs; once it is seen, hand over to the first role."""
    job = observed.job
    owner = Owner(job.namespace, job.name, job.uid)
    if observed.plan is None:
        draft.create(plan_configmap(owner, canonical_json(plan)))
    if job.spec is not None and observed.profile.spec is not None:
        template = job.spec.workspace.volume_claim_template
        if template is not None and workspace_claim_of(job.spec, job.name) not in observed.claims:
            draft.create(workspace_claim(owner, template, job.spec.workspace.retain, observed.profile.spec.storage_class_name))
            draft.wake_after(1.0)
            return
    if observed.plan is not None:
        if plan.fetch is not None:
            draft.condition(ConditionType.FETCHED, None, Reason.WAITING_FOR_PODS, "The plan is stored.")
        else:
            draft.condition(ConditionType.FETCHED, True, Reason.SKIPPED, "Model and data lie on claims.")
            draft.condition(ConditionType.PREPARED, None, Reason.WAITING_FOR_PODS, "The plan is stored.")


def missing_claims(observed: Observed, *, template_counts: bool) -> str:
    """A message about the claims that the job names and that do not exist; empty where all do.

    `template_counts`: a claim made from the template is missed too, because it has been made before.
    """
    spec = observed.job.spec
    if spec is None:
        return ""
    made = spec.workspace.volume_claim_template is not None and not template_counts
    ours = workspace_claim_of(spec, observed.job.name) if made else None
    missing = [
        f"{field}: there is no PersistentVolumeClaim {claim!r} in namespace {observed.job.namespace!r}."
        for claim, field in claims_named_by(spec, observed.job.name).items()
        if claim not in observed.claims and claim != ours
    ]
    return " ".join([*missing, "Create it, or name another."]) if missing else ""


def status_findings(findings: Sequence[Finding]) -> list[StatusFinding]:
    """Findings as they stand in status."""
    return [
        StatusFinding(
            rule=finding.rule,
            severity=finding.severity,
            field=finding.field[:TEXT_LIMIT],
            value=finding.value[:TEXT_LIMIT],
            message=finding.message[:TEXT_LIMIT],
            fix=finding.fix[:TEXT_LIMIT],
            source=finding.source[:TEXT_LIMIT],
        )
        for finding in findings[:FINDINGS_LIMIT]
    ]
