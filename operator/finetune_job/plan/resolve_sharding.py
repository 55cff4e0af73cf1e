"""The part of a plan that says how ranks share the model."""

from __future__ import annotations

from finetune_job.api.base import Dtype
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.method import MethodType
from finetune_job.api.parallelism import AutoWrapPolicy, FsdpSpec, MixedPrecisionSpec
from finetune_job.api.training import Precision
from finetune_job.methods import METHODS, Family
from finetune_job.plan.choices import Choices
from finetune_job.plan.run_plan import (
    FsdpPlan,
)


def needs_peft_wrap_policy(spec: FineTuneJobSpec) -> bool:
    """Whether FSDP 1 has to put trainable leaves into units of their own.

    Flat parameters must be uniform in `requires_grad` (unless original parameters are kept) and always in element type, and
    adapters are held in float32 beside a base of 16 bits. DoRA reads its weights outside their unit, which original parameters
    under this policy do not allow. The parameters of the methods outside LoRA's family are no leaves.
    """
    fsdp = spec.parallelism.fsdp
    if fsdp.version != 1 or METHODS[spec.method.type].family is not Family.LORA:
        return False
    return not (spec.method.type is MethodType.DORA and (fsdp.use_orig_params or _trains_rows(spec)))


def _trains_rows(spec: FineTuneJobSpec) -> bool:
    """Whether rows of an embedding are trained, which FSDP 1 can only hold beside the frozen rest as original parameters."""
    return spec.method.lora is not None and spec.method.lora.trainable_token_indices is not None


def holds_adapters_as_the_base(spec: FineTuneJobSpec) -> bool:
    """Without a unit of its own under FSDP 1 an adapter can be flattened only in its base's element type.

    Not for DoRA: its magnitudes would stand still in 16 bits, so such a manifest is refused rather than trained to no effect.
    """
    fsdp = spec.parallelism.fsdp
    if fsdp.version != 1 or spec.method.type in (MethodType.FULL, MethodType.DORA):
        return False
    return not (needs_peft_wrap_policy(spec) if fsdp.peft_wrap_policy is None else fsdp.peft_wrap_policy)


def fsdp_plan(spec: FineTuneJobSpec, choices: Choices) -> FsdpPlan:
    fsdp: FsdpSpec = spec.parallelism.fsdp
    mixed = fsdp.mixed_precision or MixedPrecisionSpec()
    first = fsdp.version == 1
    peft_policy = (
        choices.pick(
            "parallelism.fsdp.peftWrapPolicy", fsdp.peft_wrap_policy, needs_peft_wrap_policy(spec), "trainable and frozen apart"
        )
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
                not peft_policy or _trains_rows(spec),
                "what is trained beside frozen parameters needs it" if _trains_rows(spec) else "what the wrap policy needs",
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
