"""The part of a plan that says how ranks share the model."""

from __future__ import annotations

from finetune_job.api.base import Dtype
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.parallelism import AutoWrapPolicy, FsdpSpec, MixedPrecisionSpec
from finetune_job.api.training import Precision
from finetune_job.plan.choices import Choices
from finetune_job.plan.run_plan import FsdpPlan
from finetune_job.sharding import needs_original_parameters, needs_own_units


def has_own_units(spec: FineTuneJobSpec) -> bool:
    """Whether PEFT's wrap policy puts adapters into FSDP units of their own: as the user says, otherwise if they need it."""
    fsdp = spec.parallelism.fsdp
    if fsdp.peft_wrap_policy is not None:
        return fsdp.peft_wrap_policy
    return needs_own_units(spec.method.type, fsdp.version, use_orig_params=fsdp.use_orig_params, trains_rows=_trains_rows(spec))


def _trains_rows(spec: FineTuneJobSpec) -> bool:
    """Whether rows of an embedding are trained."""
    return spec.method.lora is not None and spec.method.lora.trainable_token_indices is not None


def fsdp_plan(spec: FineTuneJobSpec, choices: Choices) -> FsdpPlan:
    fsdp: FsdpSpec = spec.parallelism.fsdp
    mixed = fsdp.mixed_precision or MixedPrecisionSpec()
    first, trains_rows = fsdp.version == 1, _trains_rows(spec)
    peft_policy = (
        choices.pick("parallelism.fsdp.peftWrapPolicy", fsdp.peft_wrap_policy, has_own_units(spec), "trainable and frozen apart")
        if first
        else None
    )
    half = spec.training.precision is not Precision.FP32 and spec.model.dtype is not Dtype.FLOAT32
    param_dtype = mixed.param_dtype
    if param_dtype is None and spec.training.precision is Precision.BF16 and half:
        param_dtype = choices.pick("parallelism.fsdp.mixedPrecision.paramDtype", None, Dtype.BFLOAT16, "precision is bf16")
    return FsdpPlan(
        version=fsdp.version,
        auto_wrap_policy=choices.pick(
            "parallelism.fsdp.autoWrapPolicy", fsdp.auto_wrap_policy, AutoWrapPolicy.TRANSFORMER_BASED_WRAP, "a unit per layer"
        ),
        transformer_layer_cls_to_wrap=(
            None if fsdp.transformer_layer_cls_to_wrap is None else tuple(fsdp.transformer_layer_cls_to_wrap)
        ),
        min_num_params=fsdp.min_num_params,
        peft_wrap_policy=peft_policy,
        use_orig_params=(
            choices.pick(
                "parallelism.fsdp.useOrigParams",
                fsdp.use_orig_params,
                needs_original_parameters(own_units=peft_policy, trains_rows=trains_rows),
                "what is trained beside frozen parameters needs it" if trains_rows else "what the wrap policy needs",
            )
            if first
            else None
        ),
        sync_module_states=(
            choices.pick("parallelism.fsdp.syncModuleStates", fsdp.sync_module_states, True, "all ranks start alike")
            if first
            else None
        ),
        reshard_after_forward=(
            None
            if first
            else choices.pick("parallelism.fsdp.reshardAfterForward", fsdp.reshard_after_forward, True, "least memory")
        ),
        offload_params=fsdp.offload_params,
        param_dtype=param_dtype,
        reduce_dtype=choices.pick(
            "parallelism.fsdp.mixedPrecision.reduceDtype", mixed.reduce_dtype, Dtype.FLOAT32, "sums lose little"
        ),
    )
