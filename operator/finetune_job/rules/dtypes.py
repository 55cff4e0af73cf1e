"""Element types that meet in one FSDP unit, and what a type is too narrow for."""

from __future__ import annotations

from finetune_job.api.enumerations import Dtype
from finetune_job.api.method import QuantStorage
from finetune_job.api.training import OptimizerName, Precision
from finetune_job.methods import METHODS, Family
from finetune_job.plan.element_types import held_dtype
from finetune_job.rules.rule import Problem, Reproduction, RuleContext, rule
from finetune_job.sharding import Conflict, adapter_conflict

_PEFT_POLICY = "parallelism.fsdp.peftWrapPolicy"
_ORIG_PARAMS = "parallelism.fsdp.useOrigParams"
_AUTOCAST = "method.lora.autocastAdapterDtype"
_COMPUTE = "method.quantization.computeDtype"
_POLICY, _CLASSES = "parallelism.fsdp.autoWrapPolicy", "parallelism.fsdp.transformerLayerClsToWrap"
_SAVED = "method.lora.modulesToSave"
_PARAM_DTYPE = "parallelism.fsdp.mixedPrecision.paramDtype"
_FLATTEN = "torch: torch/distributed/fsdp/_flat_param.py, _init_metadata"
_TYPE = "method.type"
_VERSION = "parallelism.fsdp.version"


@rule(
    "fsdp1-adapter-dtype",
    "FSDP 1 cannot flatten float32 adapters with a 16-bit base",
    reads=(
        "parallelism.fsdp.version",
        _PEFT_POLICY,
        _ORIG_PARAMS,
        _AUTOCAST,
        _POLICY,
        _CLASSES,
        "model.dtype",
        "training.precision",
        "method.quantization.quantStorage",
    ),
    sources=(_FLATTEN, "peft: docs of autocast_adapter_dtype"),
    reproduction=Reproduction(
        "tests/pitfalls/test_dtypes.py::test_float32_adapters_in_16_bit_layers_fail",
        "ValueError: Must flatten tensors with uniform dtype",
    ),
    holds_for="torch >= 2.0 with peft >= 0.12, FSDP 1 only",
)
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
        field=_PEFT_POLICY,
        value=fsdp.peft_wrap_policy,
        message=f"adapters are held in float32 and the base in {base}; without PEFT's wrap policy they share a unit, whatever "
        'useOrigParams says: "Must flatten tensors with uniform dtype"',
        fix=f"set {_PEFT_POLICY} to true"
        + (f" and {_ORIG_PARAMS} to false" if needs_flat_units else "")
        + f", or {_AUTOCAST} to false, or use version 2",
        changes={_PEFT_POLICY: True} | ({_ORIG_PARAMS: False} if needs_flat_units else {}),
    )


@rule(
    "fsdp1-qlora-compute-dtype",
    "Adapters of a 4-bit base take its compute type",
    reads=("parallelism.fsdp.version", _PEFT_POLICY, _AUTOCAST, _COMPUTE, _POLICY, _CLASSES, "model.dtype", "training.precision"),
    sources=(_FLATTEN, "peft: pull request 2893"),
    reproduction=Reproduction(
        "tests/pitfalls/test_dtypes.py::test_adapters_of_a_4_bit_base_take_its_compute_type",
        "ValueError: Must flatten tensors with uniform dtype",
    ),
    holds_for="peft >= 0.19, FSDP 1 only",
)
def fsdp1_qlora_compute_dtype(context: RuleContext) -> Problem | None:
    plan = context.plan
    fsdp, lora, quantization = plan.parallelism.fsdp, plan.method.lora, plan.method.quantization
    if lora is None or quantization is None or lora.autocast_adapter_dtype:
        return None
    computed, held = quantization.compute_dtype, held_dtype(plan)
    if computed is None or held is None:
        return None
    if adapter_conflict(plan.method.type, fsdp, base=held, adapter=computed) is not Conflict.ELEMENT_TYPES:
        return None
    return Problem(
        field=_COMPUTE,
        value=computed,
        message=f"with {_AUTOCAST} false the adapters are held in {computed} and the rest of the layer in "
        f'{held}: "Must flatten tensors with uniform dtype"',
        fix=f"set {_COMPUTE} to {held}, or {_PEFT_POLICY} to true",
        changes={_COMPUTE: held},
    )


@rule(
    "float16-adapter",
    "Adam's second moment vanishes in float16",
    reads=(_AUTOCAST, "model.dtype", "training.precision", "training.optimizer", _VERSION, _PEFT_POLICY, _ORIG_PARAMS),
    sources=("torch: torch/optim/adamw.py (the state has the element type of the parameter)", "peft: docs, troubleshooting"),
    reproduction=Reproduction(
        "tests/pitfalls/test_loss_scaling.py::test_adams_epsilon_is_zero_in_float16", "no error: the weights are NaN after a step"
    ),
    holds_for="every version",
)
def float16_adapter(context: RuleContext) -> Problem | None:
    plan = context.plan
    lora = plan.method.lora
    if lora is None or lora.autocast_adapter_dtype or held_dtype(plan) is not Dtype.FLOAT16:
        return None
    if plan.training.optimizer is OptimizerName.SGD:
        return None
    # Float32 adapters may need other units than those that were written for float16 ones.
    units = (_PEFT_POLICY, _ORIG_PARAMS) if plan.parallelism.fsdp.version == 1 else ()
    # Left open, it follows from the units.
    is_written = context.spec.method.lora is not None and context.spec.method.lora.autocast_adapter_dtype is not None
    changes = dict.fromkeys((_AUTOCAST, *units) if is_written or not units else units)
    return Problem(
        field=next(iter(changes)),
        value=plan.parallelism.fsdp.peft_wrap_policy if _AUTOCAST not in changes else lora.autocast_adapter_dtype,
        message="what this trains is held in float16, where squares of gradients below 2e-4 and Adam's epsilon are zero: the "
        "first steps divide by zero",
        fix=f"remove {' and '.join(changes)}: adapters are then held in float32",
        changes=changes,
    )


@rule(
    "saved-module-16-bit",
    "Modules that are trained whole in the base's element type do not change",
    severity="warning",
    reads=(_SAVED, _AUTOCAST, "model.dtype", "training.precision"),
    sources=(
        "peft: peft/tuners/tuners_utils.py, cast_adapter_dtype (adapters alone are made float32)",
        "IEEE 754: a bfloat16 number near 1 has steps of 1/128, larger than usual updates",
    ),
    reproduction=Reproduction(
        "tests/pitfalls/test_dtypes.py::test_norms_saved_whole_stand_still_in_16_bits", "no error: the weights never change"
    ),
    holds_for="every version of peft",
)
def saved_module_16_bit(context: RuleContext) -> Problem | None:
    plan = context.plan
    lora, base = plan.method.lora, held_dtype(plan)
    if lora is None or lora.autocast_adapter_dtype or not lora.modules_to_save or base in (None, Dtype.FLOAT32):
        return None
    # Storage and products of packed weights would have to change with the precision.
    packed = plan.method.quantization is not None
    return Problem(
        field=_SAVED,
        value=list(lora.modules_to_save),
        message=f"these modules are trained in {base}: an update below a hundredth of a weight is rounded away, so that norms "
        "keep their values and other weights stop moving as the learning rate falls",
        fix=f"remove {_SAVED}" if packed else f"set training.precision to fp32, or remove {_SAVED}",
        changes={_SAVED: None} if packed else {"training.precision": Precision.FP32},
    )


@rule(
    "float16-range",
    "Activations above 65504 are infinite in float16",
    severity="warning",
    reads=("model.dtype", "training.precision", _PARAM_DTYPE),
    sources=("IEEE 754", "transformers: issue 9295 (models trained in bfloat16 give NaN in float16)"),
    reproduction=Reproduction(
        "tests/pitfalls/test_loss_scaling.py::test_large_activations_are_infinite_in_float16",
        "no error: what a gated layer computes is not finite",
    ),
    holds_for="every version",
)
def float16_range(context: RuleContext) -> Problem | None:
    plan = context.plan
    given = plan.parallelism.fsdp.param_dtype
    if (given or held_dtype(plan)) is not Dtype.FLOAT16:
        return None
    storage = plan.method.quantization.quant_storage if plan.method.quantization else None
    # All that is float16 at once: types that differ from each other are a mistake of another kind.
    settings = {_PARAM_DTYPE: given, "model.dtype": held_dtype(plan), "method.quantization.quantStorage": storage}
    changes = {name: Dtype.BFLOAT16 for name, value in settings.items() if value is not None and str(value) == Dtype.FLOAT16}
    return Problem(
        field=next(iter(changes)),
        value=Dtype.FLOAT16,
        message="the computation is in float16: what a model trained in bfloat16 computes may be above 65504, which is "
        "infinite in it; scaling the loss, which this trainer does, saves small gradients and no large activation",
        fix=f"set {' and '.join(changes)} to bfloat16",
        changes=changes,
    )


@rule(
    "dora-16-bit-magnitude",
    "DoRA's magnitudes do not change in 16 bits",
    severity="warning",
    reads=("method.type", _AUTOCAST, "model.dtype", "training.precision"),
    sources=("trl: pull request 7268", "IEEE 754: a bfloat16 number near 1 has steps of 1/128, larger than usual updates"),
    reproduction=Reproduction(
        "tests/pitfalls/test_dora.py::test_magnitudes_stand_still_in_16_bits", "no error: the magnitudes never change"
    ),
    holds_for="every version",
)
def dora_16_bit_magnitude(context: RuleContext) -> Problem | None:
    plan = context.plan
    if not METHODS[plan.method.type].needs.magnitudes or plan.method.autocast_adapter_dtype:
        return None
    if held_dtype(plan) in (None, Dtype.FLOAT32):
        return None
    first = plan.parallelism.fsdp.version == 1
    return Problem(
        field=_AUTOCAST,
        value=False,
        message=f"magnitudes of about 1 in {held_dtype(plan)} cannot take updates as small as the learning rate: they keep their "
        "first value, and DoRA becomes LoRA",
        fix=f"remove {_AUTOCAST}: adapters are then held in float32"
        + (f"; FSDP 1 then needs {_PEFT_POLICY} true and {_ORIG_PARAMS} false" if first else ""),
        changes={_AUTOCAST: None} | ({_PEFT_POLICY: True, _ORIG_PARAMS: False} if first else {}),
    )


@rule(
    "fsdp1-adapter-16-bit",
    "FSDP 1 would hold these adapters in 16 bits",
    reads=(_TYPE, _VERSION, "model.dtype", "training.precision"),
    sources=(
        "torch: torch/distributed/fsdp/_flat_param.py, _init_metadata (one element type in a flat parameter)",
        "IEEE 754: a bfloat16 number near 1 has steps of 1/128, larger than usual updates",
    ),
    reproduction=Reproduction(
        "tests/pitfalls/test_adapter_units.py::test_adapters_in_16_bits_stand_still", "no error: the weights never change"
    ),
    holds_for="torch >= 2.0, FSDP 1 only",
)
def fsdp1_adapter_16_bit(context: RuleContext) -> Problem | None:
    plan = context.plan
    kind = plan.method.type
    if METHODS[kind].family is not Family.OTHER or plan.parallelism.fsdp.version != 1 or plan.method.autocast_adapter_dtype:
        return None
    if held_dtype(plan) in (None, Dtype.FLOAT32):
        return None
    return Problem(
        field=_VERSION,
        value=1,
        message=f"adapters of {kind} are in one flat parameter with base weights in {held_dtype(plan)}, where small updates "
        "vanish",
        fix=f"remove {_VERSION}: version 2 holds them in float32; or set training.precision to fp32",
        changes={_VERSION: None},
    )


RULES = (
    fsdp1_adapter_dtype,
    fsdp1_qlora_compute_dtype,
    float16_adapter,
    saved_module_16_bit,
    float16_range,
    dora_16_bit_magnitude,
    fsdp1_adapter_16_bit,
)
