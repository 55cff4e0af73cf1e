"""Element types of a run that only the stored weights decide, and that do not go together. Called by meta_model.py.

What is known from the manifest alone, the rules say (finetune_job/rules/dtypes.py and rules/quantization.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from finetune_job.api.training import OptimizerName
from finetune_job.catalogue.book import make_finding
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.rule import Finding
from finetune_trainer.model.dtypes import ModelDtypes, resolve_casts, resolve_dtypes
from finetune_trainer.model.load import packed_dtype, stored_dtype
from finetune_trainer.preflight.model_inspection import ModelInspection

FSDP = "spec.parallelism.fsdp"
PARAM_DTYPE = f"{FSDP}.mixedPrecision.paramDtype"
STORAGE = "spec.method.quantization.quantStorage"
AUTOCAST = "spec.method.lora.autocastAdapterDtype"


def check_element_types(seen: ModelInspection) -> list[Finding]:
    """Findings about the adapted model."""
    dtypes = resolve_dtypes(seen.plan, stored_dtype(seen.directory))
    return [
        *_trained_in_float16(seen.trained.model, seen.plan),
        *_packed_and_cast(seen.plan, dtypes, packed_dtype(seen.plan, dtypes)),
    ]


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
        # Float32 adapters may need other units than those that were written for float16 ones.
        units = (f"{FSDP}.peftWrapPolicy", f"{FSDP}.useOrigParams") if first else ()
        changes = dict.fromkeys((AUTOCAST, *units), None)
        yield make_finding("trained-in-float16", field=AUTOCAST, value="float16", message=reason, fix=fix, changes=changes)
    else:
        yield make_finding(
            "trained-in-float16",
            field="spec.model.dtype",
            value="float16",
            message=reason,
            fix=fix,
            changes={"spec.model.dtype": "bfloat16"},
        )


def _packed_and_cast(plan: RunPlan, dtypes: ModelDtypes, packed: torch.dtype) -> Iterator[Finding]:
    """`packed`: element type as which 4-bit weights are stored.

    Where the type of the computation, or that of the base, follows from the stored weights; of others the rule says it.
    """
    quantization, version = plan.method.quantization, plan.parallelism.fsdp.version
    if quantization is None or quantization.bits == 8 or plan.parallelism.world_size == 1 or not packed.is_floating_point:
        return
    cast = resolve_casts(plan, dtypes, plan.parallelism.world_size).by_fsdp
    if cast in (None, packed):
        return
    computed = _name(cast)
    reason = f"packed weights stored as {_name(packed)} would be converted to {computed} like numbers, which destroys them"
    if version == 1:
        fix = f"leave {PARAM_DTYPE} out, or set spec.training.precision: fp32"
        yield make_finding(
            "qlora-storage-not-param-dtype", field=PARAM_DTYPE, value=computed, message=reason, fix=fix, changes={PARAM_DTYPE: None}
        )
    else:
        fix = f"leave {STORAGE} out"
        yield make_finding(
            "qlora-storage-not-param-dtype", field=STORAGE, value=_name(packed), message=reason, fix=fix, changes={STORAGE: None}
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
