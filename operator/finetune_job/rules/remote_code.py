"""Python code that comes with a model."""

from __future__ import annotations

from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule

_ALLOW = "model.allowRemoteCode"


@rule(
    "remote-code-not-allowed",
    "The profile does not let a model's own code run",
    reads=(_ALLOW,),
    sources=("this product's FineTuneProfile",),
    holds_for=OURS,
)
def remote_code_not_allowed(context: RuleContext) -> Problem | None:
    if not context.spec.model.allow_remote_code or context.profile is None or context.profile.allow_remote_code:
        return None
    return Problem(
        field=_ALLOW,
        value=True,
        message="code in the model directory would run with the rights of the pod, and the profile does not allow that",
        fix=f"remove {_ALLOW} and use an architecture that transformers knows, or ask for a profile that allows it",
        changes={_ALLOW: None},
    )


RULES = (remote_code_not_allowed,)
