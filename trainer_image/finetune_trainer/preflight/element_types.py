"""PURE. Element types of a run that only the stored weights decide, and that do not go together. Called by meta_model.py.

What is known from the manifest alone, the rules say (finetune_job/rules/dtypes.py, quantization.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from finetune_job.api.training import OptimizerName
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.rule import Finding
from finetune_trainer.model.dtypes import ModelDtypes

PARAM_DTYPE = "spec.parallelism.fsdp.mixedPrecision.paramDtype"
STORAGE = "spec.method.quantization.quantStorage"
AUTOCAST = "spec.method.lora.autocastAdapterDtype"


def check_element_types(model: nn.Module, plan: RunPlan, dtypes: ModelDtypes, packed: torch.dtype) -> list[Finding]:
    """Findings about the adapted model. `packed`: element type as which 4-bit weights are stored."""
    return [*_trained_in_float16(model, plan), *_two_short_types(plan, dtypes), *_packed_and_cast(plan, dtypes, packed)]


def _trained_in_float16(model: nn.Module, plan: RunPlan) -> Iterator[Finding]:
    wrong = [name for name, each in model.named_parameters() if each.requires_grad and each.dtype is torch.float16]
    if not wrong or plan.training.optimizer is OptimizerName.SGD:
        return
    first = plan.parallelism.fsdp.version == 1 and plan.parallelism.world_size > 1
    reason = (
        f"{len(wrong)} parameters are trained in float16, first {wrong[0]}: squares of gradients below 2e-4 and Adam's epsilon "
    )
    reason += "are zero in it, and the first steps divide by zero"
    fix = "set spec.model.dtype: bfloat16"
    if plan.method.lora is not None:
        fix += ", or hold adapters in float32: autocastAdapterDtype: true" + (" and peftWrapPolicy: true" if first else "")
    yield _finding("trained-in-float16", AUTOCAST if plan.method.lora is not None else "spec.model.dtype", "float16", reason, fix)


def _two_short_types(plan: RunPlan, dtypes: ModelDtypes) -> Iterator[Finding]:
    """FSDP 2 casts every parameter and input of a unit; otherwise autocast meets what it does not cast."""
    if dtypes.param is None or dtypes.load is torch.float32 or dtypes.param in (dtypes.load, torch.float32):
        return
    if plan.parallelism.world_size > 1 and plan.parallelism.fsdp.version == 2:
        return
    held, computed = _name(dtypes.load), _name(dtypes.param)
    reason = (
        f"the base is held in {held} and would compute in {computed}: operations of two 16-bit types fail, or lose what either "
    )
    reason += "type keeps"
    fix = f"set mixedPrecision.paramDtype: {held}, or spec.model.dtype: {computed}"
    yield _finding("two-16-bit-types", PARAM_DTYPE, computed, reason, fix)


def _packed_and_cast(plan: RunPlan, dtypes: ModelDtypes, packed: torch.dtype) -> Iterator[Finding]:
    """Where the type of the computation, or that of the base, follows from the stored weights; of others the rule says it."""
    quantization, version = plan.method.quantization, plan.parallelism.fsdp.version
    if quantization is None or quantization.bits == 8 or plan.parallelism.world_size == 1 or not packed.is_floating_point:
        return
    # Under version 1 autocast computes in 16 bits, and only float32 is left to FSDP.
    if dtypes.param in (None, packed) or (version == 1 and dtypes.param is not torch.float32):
        return
    computed = _name(dtypes.param)
    reason = f"packed weights stored as {_name(packed)} would be converted to {computed} like numbers, which destroys them"
    if version == 1:
        fix = f"leave {PARAM_DTYPE} out, or set spec.training.precision: fp32"
        yield _finding("qlora-storage-not-param-dtype", PARAM_DTYPE, computed, reason, fix)
    else:
        yield _finding("qlora-storage-not-param-dtype", STORAGE, _name(packed), reason, f"leave {STORAGE} out")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _finding(rule: str, field: str, value: str, message: str, fix: str) -> Finding:
    return Finding(rule=rule, severity="error", field=field, value=value, message=message, fix=fix)
