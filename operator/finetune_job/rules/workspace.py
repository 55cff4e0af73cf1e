"""Working storage."""

from __future__ import annotations

from typing import Any

from finetune_job.api.base import ClaimPath, parse_destination, parse_source
from finetune_job.api.output import RetainPolicy
from finetune_job.names import workspace_claim_name
from finetune_job.plan.inputs import named_sources
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule
from finetune_job.rules.rule_tables import NoEffect, no_effect_rules

_CLAIM = "workspace.claimName"
_TEMPLATE = "workspace.volumeClaimTemplate"
_RETAIN = "workspace.retain"
_DESTINATION = "output.destination"


def _suggested_template(context: RuleContext) -> dict[str, Any]:
    """A template that would do; only the user can know the size."""
    many = "ReadWriteMany" if context.spec.parallelism.nodes > 1 else "ReadWriteOnce"
    return {"storage": "100Gi", "accessMode": many}


@rule(
    "workspace-claim-or-template",
    "A workspace is named or made, not both",
    reads=(_CLAIM, _TEMPLATE),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_workspace.py::test_a_workspace_that_nobody_makes "
        "tests/pitfalls/test_workspace.py::test_a_template_beside_a_claim_is_for_nothing",
        "without either, pods wait for a claim that nobody makes; of both, the template is for nothing",
    ),
    holds_for=OURS,
)
def workspace_claim_or_template(context: RuleContext) -> Problem | None:
    workspace = context.spec.workspace
    if (workspace.claim_name is None) != (workspace.volume_claim_template is None):
        return None
    if workspace.claim_name is None:
        return Problem(
            field=_CLAIM,
            value=None,
            message="neither claimName nor volumeClaimTemplate says where checkpoints and prepared data are kept",
            fix=f"set {_CLAIM} to an existing claim, or {_TEMPLATE}.storage to a size",
            changes={_TEMPLATE: _suggested_template(context)},
        )
    return Problem(
        field=_CLAIM,
        value=workspace.claim_name,
        message="claimName names a claim and volumeClaimTemplate makes another; there is one workspace",
        fix=f"remove {_CLAIM} or {_TEMPLATE}",
        changes={_TEMPLATE: None},
    )


@rule(
    "workspace-inside-data",
    "The data source must not contain the workspace",
    reads=(_CLAIM, "data.source", "data.datasets", "data.validation.source"),
    sources=("this product: records are all files below their directory, and a workspace is a directory of its claim",),
    reproduction=Reproduction(
        "tests/pitfalls/test_workspace.py::test_a_job_reads_its_own_files_as_records",
        "no error at first: whatever runs next reads reports, history and prepared data of the job as records",
    ),
    holds_for=OURS,
)
def workspace_inside_data(context: RuleContext) -> Problem | None:
    claim = context.spec.workspace.claim_name
    if claim is None:
        return None
    for named in named_sources(context.spec):
        if named.is_model or parse_source(named.source) != ClaimPath(claim=claim):
            continue
        return Problem(
            field=_CLAIM,
            value=claim,
            message=f"{named.field} ({named.source}) is all of this claim, so that a run after the first, or preflight when "
            "it is retried, would read what the job itself has written there",
            fix=f"name a claim of its own, set {_TEMPLATE}.storage instead, or keep the records in a directory",
            changes={_CLAIM: None, _TEMPLATE: _suggested_template(context)},
        )
    return None


@rule(
    "start-needs-named-claim",
    "A checkpoint to start from is on the workspace claim",
    reads=("training.startFrom", _CLAIM),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_workspace.py::test_a_claim_that_is_made_for_a_job_holds_no_checkpoint_yet",
        "preflight refuses: the claim that is made for the job is empty",
    ),
    holds_for=OURS,
)
def start_needs_named_claim(context: RuleContext) -> Problem | None:
    start = context.spec.training.start_from
    if start is None or context.spec.workspace.claim_name is not None:
        return None
    return Problem(
        field="training.startFrom",
        value=start,
        message="the workspace is a claim that is made for this job, on which there is no checkpoint of another one",
        fix=f"name the workspace claim of the other job as {_CLAIM} instead of {_TEMPLATE}, or remove training.startFrom",
        changes={"training.startFrom": None},
    )


@rule(
    "output-deleted-with-job",
    "Results are not on a claim that is deleted with the job",
    reads=(_DESTINATION, _TEMPLATE, _RETAIN),
    sources=("this product: with retain: Delete the job owns the claim that is made from its template",),
    reproduction=Reproduction(
        "tests/pitfalls/test_workspace.py::test_results_go_with_a_claim_that_belongs_to_the_job",
        "no error: deleting the job deletes adapter and merged model with it",
    ),
    holds_for=OURS,
)
def output_deleted_with_job(context: RuleContext) -> Problem | None:
    workspace, target = context.spec.workspace, parse_destination(context.spec.output.destination)
    is_deleted = workspace.volume_claim_template is not None and workspace.retain is RetainPolicy.DELETE
    # Of a workspace that is named and made, another rule speaks.
    if not is_deleted or workspace.claim_name is not None or not isinstance(target, ClaimPath):
        return None
    if not context.job_name or target.claim != workspace_claim_name(context.job_name):
        return None
    return Problem(
        field=_RETAIN,
        value=workspace.retain,
        message=f"{_DESTINATION} ({context.spec.output.destination}) is on the claim that is made from {_TEMPLATE} and deleted "
        "with the job, and the results with it",
        fix=f"set {_RETAIN} to Keep, or {_DESTINATION} to a claim that is not the job's own",
        changes={_RETAIN: RetainPolicy.KEEP},
    )


NO_EFFECT = (
    NoEffect(
        "retain-with-named-claim",
        "A named claim is never deleted",
        (_RETAIN,),
        (_CLAIM,),
        lambda context: context.spec.workspace.claim_name is not None,
        "only a claim made from the template belongs to the job and can go with it",
        Reproduction(
            "tests/pitfalls/test_workspace.py::test_a_named_claim_is_nobodys_to_delete",
            "no error: the operator makes no claim that it could delete",
        ),
    ),
)
RULES = (
    workspace_claim_or_template,
    start_needs_named_claim,
    *no_effect_rules(__name__, NO_EFFECT),
    workspace_inside_data,
    output_deleted_with_job,
)
