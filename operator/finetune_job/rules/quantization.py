"""Rules on QLoRA and QDoRA: the number of bits of quantised weights, and the element types in which they are stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from finetune_job.api.enumerations import MergeBase
from finetune_job.api.method import MethodType, QuantStorage
from finetune_job.methods import METHODS, Family, lora_kind
from finetune_job.plan.element_types import held_dtype
from finetune_job.plan.resolve_training import world_size
from finetune_job.rules.rule import Problem, RuleContext, rule
from finetune_job.sharding import SHARDED_BITS, Conflict, HeldParameter, may_separate_adapters, unit_conflict

_QUANTIZATION = "method.quantization"
_TYPE = "method.type"
_BITS = f"{_QUANTIZATION}.bits"
_STORAGE = f"{_QUANTIZATION}.quantStorage"
_DESTROYED = 'would be cast to {} like ordinary numbers, which destroys them: "shape ... is invalid for input of size ..."'


@rule("quantization-without-qlora")
def quantization_without_qlora(context: RuleContext) -> Problem | None:
    method = context.spec.method
    entry = METHODS[method.type]
    if method.quantization is None or entry.packs_base:
        return None
    packed = lora_kind(packs_base=True, magnitudes=entry.needs.magnitudes)
    remove, pack = f"remove {_QUANTIZATION}", f"set {_TYPE} to {packed}"
    # QLoRA and QDoRA are LoRA and DoRA on a quantised base; a user of any other method would have to give it up.
    is_meant = entry.family is Family.LORA
    return Problem(
        value="set",
        message=f"{method.type} trains on the base as it is stored; the settings would be ignored and memory would not be saved",
        fix=f"{pack}, or {remove}" if is_meant else f"{remove}, or {pack}",
        field=_QUANTIZATION,
        changes=_as_packed(context, packed) if is_meant else {_QUANTIZATION: None},
    )


def _as_packed(context: RuleContext, kind: MethodType) -> dict[str, Any]:
    """Return the change of method, plus the changes that the rules below then require in settings that had no effect before."""
    method = context.spec.method.model_copy(update={"type": kind})
    packed = replace(context, spec=context.spec.model_copy(update={"method": method}))
    changes: dict[str, Any] = {_TYPE: kind}
    for check in (
        quantization_bits,
        fsdp1_qlora_integer_storage,
        fsdp1_qlora_storage_not_model_dtype,
        qlora_storage_not_param_dtype,
    ):
        problem = check(packed)
        changes |= (problem.changes or {}) if problem is not None else {}
    return changes


@rule("quantization-bits")
def quantization_bits(context: RuleContext) -> Problem | None:
    spec = context.spec
    quantization, entry = spec.method.quantization, METHODS[spec.method.type]
    if quantization is None or not entry.packs_base or quantization.bits == SHARDED_BITS:
        return None
    if quantization.bits == 8 and entry.needs.magnitudes:
        return Problem(
            value=quantization.bits,
            message=f"{spec.method.type} takes norms of the weights: on a CPU PEFT loses the scales of 8 bits when it reads "
            "them, and it advises against 8 bits everywhere",
            fix=f"set {_BITS} to 4",
            field=_BITS,
            changes={_BITS: SHARDED_BITS},
        )
    if quantization.bits == 8 and world_size(spec) == 1:
        if not spec.merge.enabled or spec.merge.base is not MergeBase.DEQUANTIZED:
            return None
        return Problem(
            value=spec.merge.base,
            message="only a 4-bit base can be written out as it was trained on",
            fix=f"set merge.base to Original, or {_BITS} to 4",
            field="merge.base",
            changes={"merge.base": MergeBase.ORIGINAL},
        )
    reason = (
        'the 8-bit form is an integer that FSDP 1 cannot flatten ("Cannot flatten integer dtype tensors") and FSDP 2 takes apart'
        if quantization.bits == 8
        else "bitsandbytes has no such form"
    )
    return Problem(value=quantization.bits, message=reason, fix=f"set {_BITS} to 4", field=_BITS, changes={_BITS: SHARDED_BITS})


@rule("fsdp1-qlora-integer-storage")
def fsdp1_qlora_integer_storage(context: RuleContext) -> Problem | None:
    plan = context.plan
    storage = plan.method.quantization.quant_storage if plan.method.quantization else None
    if storage is None:
        return None
    if unit_conflict((HeldParameter("packed", storage, is_trained=False),), plan.parallelism.fsdp) is not Conflict.INTEGERS:
        return None
    return Problem(value=storage, field=_STORAGE, changes={_STORAGE: held_dtype(plan)})


@rule("fsdp2-qlora-integer-storage")
def fsdp2_qlora_integer_storage(context: RuleContext) -> Problem | None:
    plan = context.plan
    quantization = plan.method.quantization
    if quantization is None or quantization.quant_storage is not QuantStorage.UINT8 or plan.parallelism.fsdp.version != 2:
        return None
    return Problem(value=quantization.quant_storage, field=_STORAGE, changes={_STORAGE: None})


@rule("fsdp1-qlora-storage-not-model-dtype")
def fsdp1_qlora_storage_not_model_dtype(context: RuleContext) -> Problem | None:
    plan = context.plan
    storage = plan.method.quantization.quant_storage if plan.method.quantization else None
    fsdp, base_dtype = plan.parallelism.fsdp, held_dtype(plan)
    if storage in (None, QuantStorage.UINT8) or base_dtype is None or may_separate_adapters(fsdp):
        return None
    unit = HeldParameter("norm", base_dtype, is_trained=False), HeldParameter("packed", storage, is_trained=False)
    if unit_conflict(unit, fsdp) is not Conflict.ELEMENT_TYPES:
        return None
    return Problem(
        value=storage,
        message=f"norms and embeddings are {base_dtype} and in one unit with packed weights stored as {storage}: "
        '"Must flatten tensors with uniform dtype"',
        fix=f"set {_STORAGE} to {base_dtype}, or leave it out",
        field=_STORAGE,
        changes={_STORAGE: base_dtype},
    )


@rule("qlora-storage-not-param-dtype")
def qlora_storage_not_param_dtype(context: RuleContext) -> Problem | None:
    plan = context.plan
    param_dtype = plan.parallelism.fsdp.param_dtype
    if plan.parallelism.fsdp.version != 2 or plan.method.quantization is None or param_dtype is None:
        return None
    storage = plan.method.quantization.quant_storage
    if storage in (None, QuantStorage.UINT8) or str(storage) == str(param_dtype):
        return None
    return Problem(
        value=storage,
        message=f"packed weights stored as {storage} {_DESTROYED.format(param_dtype)}",
        fix=f"leave {_STORAGE} out: packed weights are then stored in the type of the computation",
        field=_STORAGE,
        changes={_STORAGE: None},
    )
