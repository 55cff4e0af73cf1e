"""Activations that are computed again in the backward pass."""

from __future__ import annotations

from finetune_job.api.training import ActivationCheckpointing
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import Problem, rule

_RECOMPUTE = "training.activationCheckpointing"
_FSDP_RECOMPUTE = "parallelism.fsdp.activationCheckpointing"
_COMPILE = "training.compile"


@rule(
    "both-activation-checkpointings",
    "Activations cannot be recomputed twice",
    reads=(_RECOMPUTE, _FSDP_RECOMPUTE),
    sources=("transformers: trainer.py refuses fsdp_config.activation_checkpointing beside the training argument",),
    holds_for="transformers >= 4.30",
)
def both_activation_checkpointings(context: RuleContext) -> Problem | None:
    spec = context.spec
    if not spec.parallelism.fsdp.activation_checkpointing:
        return None
    if spec.training.activation_checkpointing is not ActivationCheckpointing.FULL:
        return None
    return Problem(
        field=_FSDP_RECOMPUTE,
        value=True,
        message=f"{_RECOMPUTE} already asks for recomputation; done twice, it costs another forward pass and an extra all-gather",
        fix=f"remove {_FSDP_RECOMPUTE}",
        changes={_FSDP_RECOMPUTE: None},
    )


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


RULES = (
    both_activation_checkpointings,
    compile_with_selective_checkpointing,
)
