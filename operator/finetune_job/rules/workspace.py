"""Working storage."""

from __future__ import annotations

from finetune_job.api.output import RetainPolicy
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule

_CLAIM = "workspace.claimName"
_TEMPLATE = "workspace.volumeClaimTemplate"
_RETAIN = "workspace.retain"


@rule(
    "workspace-claim-or-template",
    "A workspace is named or made, not both",
    reads=(_CLAIM, _TEMPLATE),
    sources=("this product's API",),
    holds_for=OURS,
)
def workspace_claim_or_template(context: RuleContext) -> Problem | None:
    workspace = context.spec.workspace
    if (workspace.claim_name is None) != (workspace.volume_claim_template is None):
        return None
    if workspace.claim_name is None:
        many = "ReadWriteMany" if context.spec.parallelism.nodes > 1 else "ReadWriteOnce"
        return Problem(
            field=_CLAIM,
            value=None,
            message="neither claimName nor volumeClaimTemplate says where checkpoints and prepared data are kept",
            fix=f"set {_CLAIM} to an existing claim, or {_TEMPLATE}.storage to a size",
            changes={_TEMPLATE: {"storage": "100Gi", "accessMode": many}},
        )
    return Problem(
        field=_CLAIM,
        value=workspace.claim_name,
        message="claimName names a claim and volumeClaimTemplate makes another; there is one workspace",
        fix=f"remove {_CLAIM} or {_TEMPLATE}",
        changes={_TEMPLATE: None},
    )


@rule(
    "retain-with-named-claim",
    "A named claim is never deleted",
    severity="warning",
    reads=(_RETAIN, _CLAIM),
    sources=("this product's API",),
    holds_for=OURS,
)
def retain_with_named_claim(context: RuleContext) -> Problem | None:
    workspace = context.spec.workspace
    if workspace.claim_name is None or workspace.retain is not RetainPolicy.DELETE:
        return None
    return Problem(
        field=_RETAIN,
        value=workspace.retain,
        message="NoEffect: only a claim made from the template belongs to the job and can go with it",
        fix=f"remove {_RETAIN}",
        changes={_RETAIN: None},
    )


RULES = (workspace_claim_or_template, retain_with_named_claim)
