"""torch.compile of the layers."""

from __future__ import annotations

from finetune_job.api.training import ActivationCheckpointing
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import Problem, rule

_COMPILE = "training.compile"
_RECOMPUTE = "training.activationCheckpointing"


@rule(
    "compile-with-selective-checkpointing",
    "A compiled layer hides its matrix products",
    reads=(_COMPILE, _RECOMPUTE),
    sources=("torch: torch/utils/checkpoint.py, create_selective_checkpoint_contexts (it sees operations as they are dispatched)",),
    holds_for="torch >= 2.4",
)
def compile_with_selective_checkpointing(context: RuleContext) -> Problem | None:
    training = context.spec.training
    if not training.compile or training.activation_checkpointing is not ActivationCheckpointing.SELECTIVE:
        return None
    return Problem(
        field=_RECOMPUTE,
        value=training.activation_checkpointing,
        message="layers are compiled whole, and inside a compiled layer nothing tells a matrix product from what is cheap again",
        fix=f"set {_RECOMPUTE} to None or Full, or {_COMPILE} to false",
        changes={_RECOMPUTE: ActivationCheckpointing.NONE},
    )


RULES = (compile_with_selective_checkpointing,)
