"""Activations that are computed again in the backward pass."""

from __future__ import annotations

from finetune_job.api.training import ActivationCheckpointing
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import Problem, rule
from finetune_job.rules.rule import Reproduction

_RECOMPUTE = "training.activationCheckpointing"
_COMPILE = "training.compile"


@rule(
    "compile-with-selective-checkpointing",
    "A compiled layer hides its matrix products",
    reads=(_COMPILE, _RECOMPUTE),
    sources=("torch: torch/utils/checkpoint.py, create_selective_checkpoint_contexts (it sees operations as they are dispatched)",),
    reproduction=Reproduction(
        "tests/pitfalls/test_activation_checkpointing.py::test_selective_recomputation_keeps_all_of_a_compiled_layer",
        "no error: as much is kept for the backward pass as without recomputation",
    ),
    holds_for="torch >= 2.4",
)
def compile_with_selective_checkpointing(context: RuleContext) -> Problem | None:
    training = context.spec.training
    if not training.compile or training.activation_checkpointing is not ActivationCheckpointing.SELECTIVE:
        return None
    return Problem(
        field=_RECOMPUTE,
        value=training.activation_checkpointing,
        message="layers are compiled whole, and inside one nothing tells a matrix product from what is cheap again: all would be "
        "kept, as without recomputation",
        fix=f"set {_RECOMPUTE} to Full, or {_COMPILE} to false",
        changes={_RECOMPUTE: ActivationCheckpointing.FULL},
    )


RULES = (compile_with_selective_checkpointing,)
