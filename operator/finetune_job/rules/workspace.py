"""Rules on the workspace, the working storage of a job."""

from __future__ import annotations

from typing import Any

from finetune_job.api.base import ClaimPath, parse_destination, parse_source
from finetune_job.api.output import RetainPolicy
from finetune_job.names import workspace_claim_name
from finetune_job.plan.inputs import named_sources
from finetune_job.rules.rule import Problem, RuleContext, rule

_CLAIM = "workspace.claimName"
_TEMPLATE = "workspace.volumeClaimTemplate"
_RETAIN = "workspace.retain"
_DESTINATION = "output.destination"


def _suggested_template(context: RuleContext) -> dict[str, Any]:
    """Return an example template for use in a fix; only the user knows the right size."""
    many = "ReadWriteMany" if context.spec.parallelism.nodes > 1 else "ReadWriteOnce"
    return {"storage": "100Gi", "accessMode": many}


@rule("workspace-claim-or-template")
def workspace_claim_or_template(context: RuleContext) -> Problem | None:
    workspace = context.spec.workspace
    if (workspace.claim_name is None) != (workspace.volume_claim_template is None):
        return None
    if workspace.claim_name is None:
        return Problem(
            value=None,
            message="neither claimName nor volumeClaimTemplate says where checkpoints and prepared data are kept",
            fix=f"set {_CLAIM} to an existing claim, or {_TEMPLATE}.storage to a size",
            changes={_TEMPLATE: _suggested_template(context)},
        )
    return Problem(
        value=workspace.claim_name,
        message="claimName names a claim and volumeClaimTemplate makes another, but a job has only one workspace",
        fix=f"remove {_CLAIM} or {_TEMPLATE}",
        changes={_TEMPLATE: None},
    )


@rule("workspace-inside-data")
def workspace_inside_data(context: RuleContext) -> Problem | None:
    claim = context.spec.workspace.claim_name
    if claim is None:
        return None
    for named in named_sources(context.spec):
        if named.is_model or parse_source(named.source) != ClaimPath(claim=claim):
            continue
        return Problem(
            value=claim,
            message=f"{named.field} ({named.source}) is all of this claim, so a run after the first, or preflight when "
            "it is retried, would read what the job itself has written there",
            fix=f"name a claim of its own, set {_TEMPLATE}.storage instead, or keep the records in a directory",
            changes={_CLAIM: None, _TEMPLATE: _suggested_template(context)},
        )
    return None


@rule("start-needs-named-claim")
def start_needs_named_claim(context: RuleContext) -> Problem | None:
    start = context.spec.training.start_from
    if start is None or context.spec.workspace.claim_name is not None:
        return None
    return Problem(value=start)


@rule("output-deleted-with-job")
def output_deleted_with_job(context: RuleContext) -> Problem | None:
    workspace, target = context.spec.workspace, parse_destination(context.spec.output.destination)
    is_deleted = workspace.volume_claim_template is not None and workspace.retain is RetainPolicy.DELETE
    # Another rule covers a workspace with both a claim name and a template.
    if not is_deleted or workspace.claim_name is not None or not isinstance(target, ClaimPath):
        return None
    if not context.job_name or target.claim != workspace_claim_name(context.job_name):
        return None
    return Problem(
        value=workspace.retain,
        message=f"{_DESTINATION} ({context.spec.output.destination}) is on the claim that is made from {_TEMPLATE}: it is "
        "deleted with the job, and the results with it",
        fix=f"set {_RETAIN} to Keep, or {_DESTINATION} to a claim that is not the job's own",
        field=_RETAIN,
        changes={_RETAIN: RetainPolicy.KEEP},
    )


rule("retain-with-named-claim")(lambda context: context.spec.workspace.claim_name is not None)
