"""Rules on mixed element types within an FSDP unit, and on values that are too large or too small for their type."""

from __future__ import annotations

from finetune_job.api.enumerations import Dtype
from finetune_job.api.method import QuantStorage
from finetune_job.api.training import OptimizerName, Precision
from finetune_job.methods import METHODS, Family
from finetune_job.plan.element_types import held_dtype
from finetune_job.rules.rule import Problem, RuleContext, rule
from finetune_job.sharding import Conflict, adapter_conflict

_PEFT_POLICY = "parallelism.fsdp.peftWrapPolicy"
_ORIG_PARAMS = "parallelism.fsdp.useOrigParams"
_AUTOCAST = "method.lora.autocastAdapterDtype"
_COMPUTE = "method.quantization.computeDtype"
_SAVED = "method.lora.modulesToSave"
_PARAM_DTYPE = "parallelism.fsdp.mixedPrecision.paramDtype"
_VERSION = "parallelism.fsdp.version"


@rule("fsdp1-adapter-dtype")
def fsdp1_adapter_dtype(context: RuleContext) -> Problem | None:
    plan = context.plan
    fsdp, lora, kind = plan.parallelism.fsdp, plan.method.lora, plan.method.type
    if lora is None or not lora.autocast_adapter_dtype:
        return None
    storage = plan.method.quantization.quant_storage if plan.method.quantization else None
    base = held_dtype(plan) or (storage if storage is not QuantStorage.UINT8 else None)
    if base is None or adapter_conflict(kind, fsdp, base, Dtype.FLOAT32) is not Conflict.ELEMENT_TYPES:
        return None
    needs_flat_units = METHODS[kind].needs.reads_adapters_outside_units
    return Problem(
        value=fsdp.peft_wrap_policy,
        message=f"adapters are held in float32 and the base in {base}; without PEFT's wrap policy they share a unit, whatever "
        'useOrigParams says, and FSDP fails: "Must flatten tensors with uniform dtype"',
        fix=f"set {_PEFT_POLICY} to true"
        + (f" and {_ORIG_PARAMS} to false" if needs_flat_units else "")
        + f", or {_AUTOCAST} to false, or use version 2",
        field=_PEFT_POLICY,
        changes={_PEFT_POLICY: True} | ({_ORIG_PARAMS: False} if needs_flat_units else {}),
    )


@rule("fsdp1-qlora-compute-dtype")
def fsdp1_qlora_compute_dtype(context: RuleContext) -> Problem | None:
    plan = context.plan
    fsdp, lora, quantization = plan.parallelism.fsdp, plan.method.lora, plan.method.quantization
    if lora is None or quantization is None or lora.autocast_adapter_dtype:
        return None
    computed, base_dtype = quantization.compute_dtype, held_dtype(plan)
    if computed is None or base_dtype is None:
        return None
    if adapter_conflict(plan.method.type, fsdp, base=base_dtype, adapter=computed) is not Conflict.ELEMENT_TYPES:
        return None
    return Problem(
        value=computed,
        message=f"with {_AUTOCAST} false the adapters are held in {computed} and the rest of the layer in "
        f'{base_dtype}: "Must flatten tensors with uniform dtype"',
        fix=f"set {_COMPUTE} to {base_dtype}, or {_PEFT_POLICY} to true",
        field=_COMPUTE,
        changes={_COMPUTE: base_dtype},
    )


@rule("float16-adapter")
def float16_adapter(context: RuleContext) -> Problem | None:
    plan = context.plan
    lora = plan.method.lora
    if lora is None or lora.autocast_adapter_dtype or held_dtype(plan) is not Dtype.FLOAT16:
        return None
    if plan.training.optimizer is OptimizerName.SGD:
        return None
    # Float32 adapters may need different FSDP units than float16 adapters.
    units = (_PEFT_POLICY, _ORIG_PARAMS) if plan.parallelism.fsdp.version == 1 else ()
    # If the manifest does not set autocastAdapterDtype, its value follows from the FSDP units.
    is_written = context.spec.method.lora is not None and context.spec.method.lora.autocast_adapter_dtype is not None
    changes = dict.fromkeys((_AUTOCAST, *units) if is_written or not units else units)
    return Problem(
        value=plan.parallelism.fsdp.peft_wrap_policy if _AUTOCAST not in changes else lora.autocast_adapter_dtype,
        message="the trained parameters are held in float16, where Adam's epsilon and the square of any gradient below 2e-4 are "
        "zero: the first steps divide by zero",
        fix=f"remove {' and '.join(changes)}: adapters are then held in float32",
        field=next(iter(changes)),
        changes=changes,
    )


@rule("saved-module-16-bit")
def saved_module_16_bit(context: RuleContext) -> Problem | None:
    plan = context.plan
    lora, base = plan.method.lora, held_dtype(plan)
    if lora is None or lora.autocast_adapter_dtype or not lora.modules_to_save or base in (None, Dtype.FLOAT32):
        return None
    # With quantised weights, changing the precision is no simple fix: their storage and compute types would have to change too.
    packed = plan.method.quantization is not None
    return Problem(
        value=list(lora.modules_to_save),
        message=f"these modules are trained in {base}: an update below a hundredth of a weight is rounded away, so norms "
        "keep their values and other weights stop moving as the learning rate falls",
        fix=f"remove {_SAVED}" if packed else f"set training.precision to fp32, or remove {_SAVED}",
        changes={_SAVED: None} if packed else {"training.precision": Precision.FP32},
    )


@rule("float16-range")
def float16_range(context: RuleContext) -> Problem | None:
    plan = context.plan
    given = plan.parallelism.fsdp.param_dtype
    if (given or held_dtype(plan)) is not Dtype.FLOAT16:
        return None
    storage = plan.method.quantization.quant_storage if plan.method.quantization else None
    # Change all float16 settings together: another rule refuses types that differ from each other.
    settings = {_PARAM_DTYPE: given, "model.dtype": held_dtype(plan), "method.quantization.quantStorage": storage}
    changes = {name: Dtype.BFLOAT16 for name, value in settings.items() if value is not None and str(value) == Dtype.FLOAT16}
    return Problem(
        value=Dtype.FLOAT16,
        message="the computation is in float16: values that a model trained in bfloat16 computes may be above 65504, which "
        "float16 turns into infinity; scaling the loss, which this trainer does, saves small gradients, not large activations",
        fix=f"set {' and '.join(changes)} to bfloat16",
        field=next(iter(changes)),
        changes=changes,
    )


@rule("dora-16-bit-magnitude")
def dora_16_bit_magnitude(context: RuleContext) -> Problem | None:
    plan = context.plan
    if not METHODS[plan.method.type].needs.magnitudes or plan.method.autocast_adapter_dtype:
        return None
    if held_dtype(plan) in (None, Dtype.FLOAT32):
        return None
    first = plan.parallelism.fsdp.version == 1
    return Problem(
        value=False,
        message=f"magnitudes of about 1 in {held_dtype(plan)} cannot take updates as small as the learning rate: they keep their "
        "first value, and DoRA becomes LoRA",
        fix=f"remove {_AUTOCAST}: adapters are then held in float32"
        + (f"; FSDP 1 then needs {_PEFT_POLICY} true and {_ORIG_PARAMS} false" if first else ""),
        field=_AUTOCAST,
        changes={_AUTOCAST: None} | ({_PEFT_POLICY: True, _ORIG_PARAMS: False} if first else {}),
    )


@rule("fsdp1-adapter-16-bit")
def fsdp1_adapter_16_bit(context: RuleContext) -> Problem | None:
    plan = context.plan
    kind = plan.method.type
    if METHODS[kind].family is not Family.OTHER or plan.parallelism.fsdp.version != 1 or plan.method.autocast_adapter_dtype:
        return None
    if held_dtype(plan) in (None, Dtype.FLOAT32):
        return None
    return Problem(
        value=1,
        message=f"adapters of {kind} are in one flat parameter with base weights in {held_dtype(plan)}, where small updates "
        "vanish",
        fix=f"remove {_VERSION}: version 2 holds them in float32; or set training.precision to fp32",
        field=_VERSION,
    )
