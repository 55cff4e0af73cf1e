"""The stage from the manifest to the frozen plan.

Until the job starts, every pass evaluates it again, so it continues on its own once a missing profile or claim appears. Freezing
the plan is a single status write with the observed resourceVersion as precondition. The plan's ConfigMap and the first Job are
created after this write, in the same pass.
"""

from __future__ import annotations

import json

from finetune_job.api.status import PlanChoice, PlanStatus
from finetune_job.catalogue.book import make_finding
from finetune_job.conditions import find_condition
from finetune_job.finding import INVALID_FIELD, MAX_TEXT_LENGTH
from finetune_job.plan.digest import canonical_json, text_sha256
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import Choice, JobIdentity, RunPlan
from finetune_job.reasons import ConditionType, Reason
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext
from finetune_operator.children.claims import claims_named_by, workspace_claim, workspace_claim_of
from finetune_operator.children.frozen_run import FrozenRun, Owner, plan_configmap
from finetune_operator.children.network_policies import network_policies
from finetune_operator.decide.pass_result import PassResult, status_findings
from finetune_operator.decide.profile_verdict import invalid_profile, refused_namespace
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.stage import CONDITION, attempt_of, is_started
from finetune_operator.decide.seen.times import timestamp
from finetune_operator.decide.stages.blocked import wait_for_refused_write

NEAR_PLACES = 10
"""Last place in a line that status shows exactly; later places are rounded."""
FAR_REQUEUE_SECONDS = 300.0
"""Pause between two checks of a job that is further back in its line than NEAR_PLACES; it is also woken when its turn comes."""
REQUEUE_SECONDS = 30.0
"""Pause between two checks of what is not watched: whether a claim was created, and the labels of the namespace."""


def has_begun(observed: Observed) -> bool:
    """Whether anything was created from the frozen plan. From then on, the plan is never resolved again, and if it is lost, it
    must be restored.
    """
    status = observed.job.status
    conditions = [find_condition(status.conditions, kind) for kind in CONDITION.values()]
    reached = any(
        condition is not None and condition.status == "True" and condition.reason != Reason.SKIPPED for condition in conditions
    )
    stored = observed.plan is not None and status.plan is not None and text_sha256(observed.plan.plan_json) == status.plan.hash
    tried = any(attempt_of(status, role) for role in CONDITION)
    is_running = observed.live is not None and (observed.live.batch_jobs or observed.live.running_pods)
    return bool(stored or reached or tried or status.attempts or observed.batch_jobs or is_running)


def validate_stage(observed: Observed, result: PassResult) -> FrozenRun | None:
    """Check the manifest, freeze the plan and store it. Returns the run with which the first stage can start in the same pass.

    The plan is frozen by the status write, and all children are created after that.
    """
    plan = _accepted_plan(observed, result)
    if plan is None or plan.placement is None:
        return None
    result.condition(ConditionType.STALLED, False, Reason.HEALTHY)
    status = observed.job.status
    plan_json = canonical_json(plan)
    digest = text_sha256(plan_json)
    if not is_started(status) or status.plan is None or status.plan.hash != digest:
        # If the digest has changed before the first child was created, the profile was edited after the freeze. Nothing has run
        # yet, so the newer plan is frozen instead.
        choices = [plan_choice(choice) for choice in plan.choices]
        result.set(
            start_time=status.start_time or timestamp(result.now),
            plan=PlanStatus(hash=digest, trainer_image=plan.placement.trainer_image, choices=choices),
        )
        result.condition(ConditionType.VALIDATED, True, Reason.ACCEPTED, f"Plan {digest[:12]} is frozen.")
        result.condition(ConditionType.FINISHED, False, Reason.RUNNING)
        for stage in (*CONDITION.values(), ConditionType.REHEARSED):
            result.condition(stage, None, Reason.PENDING)
        result.emit("Normal", Reason.ACCEPTED, f"Accepted; plan {digest[:12]} is frozen.")
    if observed.plan is not None:
        # This ConfigMap is from an earlier freeze, because its content does not match the digest in status.
        result.delete_object("ConfigMap", observed.plan.name, observed.plan.uid)
        result.requeue_after(1.0)
        return None
    if wait_for_refused_write(observed, result, ConditionType.READY):
        return None
    # Create what all stages need before the Job of the first stage.
    job, profile = observed.job, observed.profile.spec
    owner = Owner(job.namespace, job.name, job.uid)
    if job.spec is not None and profile is not None:
        template = job.spec.workspace.volume_claim_template
        if template is not None and workspace_claim_of(job.spec, job.name) not in observed.claims:
            # Create the claim before the ConfigMap: once the ConfigMap exists, a missing claim means that somebody deleted it.
            result.create(workspace_claim(owner, template, job.spec.workspace.retain, profile.storage_class_name))
        for policy in network_policies(owner, plan, profile.network, observed.operator_namespace):
            result.create(policy)
    result.create(plan_configmap(owner, plan_json))
    return FrozenRun(owner, plan, plan.placement, digest)


def _accepted_plan(observed: Observed, result: PassResult) -> RunPlan | None:
    """Return the plan; None if the job is refused, suspended or waiting in its line."""
    job, profile = observed.job, observed.profile
    if job.spec is None:
        _refuse(result, Reason.INVALID_SPEC, f"The manifest is not valid: {job.spec_error}")
        finding = make_finding(
            INVALID_FIELD,
            field="spec",
            value="",
            message=f"The manifest is not valid: {job.spec_error}",
            fix="Correct these fields; `finetune validate` lists the values that each field accepts.",
        )
        result.set(findings=[finding.shortened(MAX_TEXT_LENGTH)])
        return None
    if profile.spec is None:
        if profile.error:
            _refuse(result, Reason.PROFILE_INVALID, f"spec.profile: {invalid_profile(profile)}")
        else:
            _refuse(result, Reason.PROFILE_NOT_FOUND, f"spec.profile: there is no FineTuneProfile {profile.name!r}. Create it.")
        return None
    refused = refused_namespace(profile, job.namespace, observed.namespace)
    if refused:
        _refuse(result, Reason.PROFILE_NOT_ALLOWED, f"spec.profile: {refused}")
        if observed.namespace is not None:
            result.requeue_after(REQUEUE_SECONDS)
        return None
    findings = evaluate(RuleContext(job.spec, profile.spec, job.name))
    result.set(findings=status_findings(findings))
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        more = f" And {len(errors) - 1} more in status.findings." if len(errors) > 1 else ""
        _refuse(result, Reason.REFUSED, f"{errors[0].rule}: {errors[0].field}: {errors[0].message} {errors[0].fix}{more}")
        return None
    missing = missing_claims(observed, template_counts=False)
    if missing:
        _refuse(result, Reason.CLAIM_NOT_FOUND, missing)
        result.requeue_after(REQUEUE_SECONDS)
        return None
    if job.spec.run.suspend:
        if not is_started(job.status):
            result.condition(
                ConditionType.VALIDATED, None, Reason.SUSPENDED_BY_USER, "Accepted; the plan is frozen on resumption."
            )
        result.condition(ConditionType.STALLED, False, Reason.HEALTHY)
        result.condition(ConditionType.SUSPENDED, True, Reason.SUSPENDED_BY_USER, "spec.run.suspend is true.")
        result.condition(ConditionType.READY, False, Reason.SUSPENDED_BY_USER)
        return None
    result.condition(ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED)
    if not is_started(job.status) and _waits_in_line(observed, result):
        return None
    return resolve(JobIdentity(namespace=job.namespace, name=job.name, uid=job.uid), job.spec, profile.spec, profile.name)


def _waits_in_line(observed: Observed, result: PassResult) -> bool:
    line = observed.line
    if line is None or line.ahead < line.limit:
        return False
    place = line.ahead - line.limit + 1
    is_near = place <= NEAR_PLACES
    # With exact places, thousands of jobs far back in the line would each cost a status write whenever the line moves.
    shown_place = str(place) if is_near else f"about {float(f'{place:.1g}'):.0f}"
    message = (
        f"Profile {observed.profile.name} allows {line.limit} active jobs in namespace {observed.job.namespace} "
        f"(spec.maxActiveJobs). Place in the line: {shown_place}."
    )
    result.condition(ConditionType.VALIDATED, None, Reason.WAITING_IN_LINE, message)
    result.condition(ConditionType.READY, False, Reason.WAITING_IN_LINE, message)
    result.condition(ConditionType.STALLED, False, Reason.HEALTHY)
    result.requeue_after(REQUEUE_SECONDS if is_near else FAR_REQUEUE_SECONDS)
    return True


def _refuse(result: PassResult, reason: Reason, message: str) -> None:
    result.condition(ConditionType.VALIDATED, False, reason, message)
    result.stall(reason, message)


def plan_choice(choice: Choice) -> PlanChoice:
    """Convert a choice to the form that status has."""
    return PlanChoice(
        field=choice.field[:MAX_TEXT_LENGTH],
        value=json.dumps(choice.value)[:MAX_TEXT_LENGTH],
        reason=choice.reason[:MAX_TEXT_LENGTH],
    )


def missing_claims(observed: Observed, *, template_counts: bool) -> str:
    """Return a message about claims that the job names but that do not exist; empty if all exist.

    `template_counts`: whether the claim from the template must exist too, because it was created earlier.
    """
    spec = observed.job.spec
    if spec is None:
        return ""
    is_optional = spec.workspace.volume_claim_template is not None and not template_counts
    optional = workspace_claim_of(spec, observed.job.name) if is_optional else None
    missing = [
        f"{field}: there is no PersistentVolumeClaim {claim!r} in namespace {observed.job.namespace!r}."
        for claim, field in claims_named_by(spec, observed.job.name).items()
        if claim not in observed.claims and claim != optional
    ]
    return " ".join([*missing, "Create it, or name another."]) if missing else ""
