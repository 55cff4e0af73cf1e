"""Element types that meet in one FSDP unit."""

from __future__ import annotations

from finetune_job.api.base import Dtype
from finetune_job.api.method import LoraBias, MethodType, QuantStorage
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import Problem, rule
from finetune_job.rules.effective import effective_plan, held_dtype
from finetune_job.rules.rule import Reproduction

_PEFT_POLICY = "parallelism.fsdp.peftWrapPolicy"
_ORIG_PARAMS = "parallelism.fsdp.useOrigParams"
_AUTOCAST = "method.lora.autocastAdapterDtype"
_COMPUTE = "method.quantization.computeDtype"
_BIAS = "method.lora.bias"
_PARAM_DTYPE = "parallelism.fsdp.mixedPrecision.paramDtype"
_FLATTEN = "torch: torch/distributed/fsdp/_flat_param.py, _init_metadata"


@rule(
    "fsdp1-adapter-dtype",
    "FSDP 1 cannot flatten float32 adapters with a 16-bit base",
    reads=(
        "parallelism.fsdp.version",
        _PEFT_POLICY,
        _ORIG_PARAMS,
        _AUTOCAST,
        "model.dtype",
        "training.precision",
        "method.quantization.quantStorage",
    ),
    sources=(_FLATTEN, "peft: docs of autocast_adapter_dtype"),
    reproduction=Reproduction("tests/pitfalls/test_dtypes.py", "ValueError: Must flatten tensors with uniform dtype"),
    holds_for="torch >= 2.0 with peft >= 0.12, FSDP 1 only",
)
def fsdp1_adapter_dtype(context: RuleContext) -> Problem | None:
    plan = effective_plan(context)
    fsdp, lora = plan.parallelism.fsdp, plan.method.lora
    if fsdp.version != 1 or lora is None or fsdp.peft_wrap_policy or not lora.autocast_adapter_dtype:
        return None
    storage = plan.method.quantization.quant_storage if plan.method.quantization else None
    base = held_dtype(plan) or (storage if storage is not QuantStorage.UINT8 else None)
    if base is None or str(base) == Dtype.FLOAT32:
        return None
    dora = plan.method.type is MethodType.DORA
    return Problem(
        field=_PEFT_POLICY,
        value=fsdp.peft_wrap_policy,
        message=f"adapters are held in float32 and the base in {base}; without PEFT's wrap policy they share a unit, whatever "
        'useOrigParams says: "Must flatten tensors with uniform dtype"',
        fix=f"set {_PEFT_POLICY} to true"
        + (f" and {_ORIG_PARAMS} to false" if dora else "")
        + f", or {_AUTOCAST} to false, or use version 2",
        changes={_PEFT_POLICY: True} | ({_ORIG_PARAMS: False} if dora else {}),
    )


@rule(
    "fsdp1-qlora-compute-dtype",
    "Adapters of a 4-bit base take its compute type",
    reads=("parallelism.fsdp.version", _PEFT_POLICY, _AUTOCAST, _COMPUTE, "model.dtype", "training.precision"),
    sources=(_FLATTEN, "peft: pull request 2893"),
    reproduction=Reproduction("tests/pitfalls/test_dtypes.py", "ValueError: Must flatten tensors with uniform dtype"),
    holds_for="peft >= 0.19, FSDP 1 only",
)
def fsdp1_qlora_compute_dtype(context: RuleContext) -> Problem | None:
    plan = effective_plan(context)
    fsdp, lora, quantization = plan.parallelism.fsdp, plan.method.lora, plan.method.quantization
    if fsdp.version != 1 or lora is None or quantization is None or fsdp.peft_wrap_policy or lora.autocast_adapter_dtype:
        return None
    if quantization.compute_dtype is None or held_dtype(plan) is None or quantization.compute_dtype is held_dtype(plan):
        return None
    return Problem(
        field=_COMPUTE,
        value=quantization.compute_dtype,
        message=f"with {_AUTOCAST} false the adapters are held in {quantization.compute_dtype} and the rest of the layer in "
        f'{held_dtype(plan)}: "Must flatten tensors with uniform dtype"',
        fix=f"set {_COMPUTE} to {held_dtype(plan)}, or {_PEFT_POLICY} to true",
        changes={_COMPUTE: held_dtype(plan)},
    )


@rule(
    "fsdp2-trained-bias-dtype",
    "FSDP 2 needs one element type for what is trained in a unit",
    severity="warning",
    reads=("parallelism.fsdp.version", _BIAS, _AUTOCAST, "model.dtype", "training.precision"),
    sources=("torch: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _init_mp_dtypes",),
    reproduction=Reproduction("tests/pitfalls/test_dtypes.py", "AssertionError: FSDP expects uniform original parameter dtype"),
    holds_for="torch >= 2.6, FSDP 2 only, models whose layers have biases",
)
def fsdp2_trained_bias_dtype(context: RuleContext) -> Problem | None:
    plan = effective_plan(context)
    lora, base = plan.method.lora, held_dtype(plan)
    if plan.parallelism.fsdp.version != 2 or lora is None or lora.bias is LoraBias.NONE or not lora.autocast_adapter_dtype:
        return None
    if base in (None, Dtype.FLOAT32):
        return None
    return Problem(
        field=_BIAS,
        value=lora.bias,
        message=f"biases are trained in {base} beside float32 adapters of the same layer: a model whose layers have biases fails "
        'with "FSDP expects uniform original parameter dtype"; preflight looks at the model',
        fix=f"set {_BIAS} to none, or {_AUTOCAST} to false",
        changes={_BIAS: "none"},
    )


@rule(
    "float16-without-loss-scaling",
    "Gradients in float16 vanish or overflow without loss scaling",
    severity="warning",
    reads=("model.dtype", "training.precision", _PARAM_DTYPE),
    sources=("Micikevicius et al. 2018, Mixed precision training; this trainer scales no losses",),
    holds_for="every version",
)
def float16_without_loss_scaling(context: RuleContext) -> Problem | None:
    plan = effective_plan(context)
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
        message="the computation is in float16, whose gradients vanish below 6e-8 and overflow above 65504, and no loss is scaled",
        fix=f"set {' and '.join(changes)} to bfloat16",
        changes=changes,
    )


RULES = (fsdp1_adapter_dtype, fsdp1_qlora_compute_dtype, fsdp2_trained_bias_dtype, float16_without_loss_scaling)
