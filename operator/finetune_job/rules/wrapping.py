"""Rules on which modules become FSDP units, and on what a unit may contain."""

from __future__ import annotations

import re

from finetune_job.api.enumerations import Dtype
from finetune_job.api.method import LoraBias
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.methods import METHODS, Family
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.rule import Problem, RuleContext, rule
from finetune_job.sharding import Conflict, adapter_conflict, is_one_flat_parameter, reads_sharded_weights

_CLASSES = "parallelism.fsdp.transformerLayerClsToWrap"
_POLICY = "parallelism.fsdp.autoWrapPolicy"
_PEFT_POLICY = "parallelism.fsdp.peftWrapPolicy"
_ORIG_PARAMS = "parallelism.fsdp.useOrigParams"
_BIAS = "method.lora.bias"


def _class_names(written: list[str]) -> list[str] | None:
    """Return the class names that were probably meant, or None."""
    parts = [part.rsplit(".", 1)[-1] for text in written for part in re.split(r"[\s,]+", text)]
    return list(dict.fromkeys(part for part in parts if part.isidentifier())) or None


@rule("wrap-class-list-empty")
def wrap_class_list_empty(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.transformer_layer_cls_to_wrap
    if written is None or written:
        return None
    return Problem(value=written)


@rule("wrap-class-name-blank")
def wrap_class_name_blank(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.transformer_layer_cls_to_wrap or []
    if all(name.strip() for name in written):
        return None
    return Problem(value=written, changes={_CLASSES: _class_names(written)})


@rule("wrap-class-name-malformed")
def wrap_class_name_malformed(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.transformer_layer_cls_to_wrap or []
    wrong = [name for name in written if name.strip() and not name.isidentifier()]
    if not wrong:
        return None
    return Problem(
        value=written,
        message=f'"{wrong[0]}" is not the name of a class: each item is compared whole, and blanks and commas stay in it',
        fix="write one bare class name per item, as in [LlamaDecoderLayer]",
        changes={_CLASSES: _class_names(written)},
    )


@rule("wrap-class-without-transformer-policy")
def wrap_class_without_transformer_policy(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.transformer_layer_cls_to_wrap
    policy = context.plan.parallelism.fsdp.auto_wrap_policy
    if not written or policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
        return None
    return Problem(
        value=written,
        message=f"NoEffect: {policy} does not look at class names",
        fix=f"remove the field, or set {_POLICY} to TRANSFORMER_BASED_WRAP",
    )


@rule("min-num-params-without-size-policy")
def min_num_params_without_size_policy(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.min_num_params
    policy = context.plan.parallelism.fsdp.auto_wrap_policy
    if written is None or policy is AutoWrapPolicy.SIZE_BASED_WRAP:
        return None
    return Problem(
        value=written,
        message=f"NoEffect: {policy} does not look at sizes",
        fix=f"remove the field, or set {_POLICY} to SIZE_BASED_WRAP",
    )


@rule("no-wrap-gathers-everything")
def no_wrap_gathers_everything(context: RuleContext) -> Problem | None:
    plan = context.plan.parallelism
    if plan.fsdp.auto_wrap_policy is not AutoWrapPolicy.NO_WRAP or plan.world_size == 1:
        return None
    return Problem(value=plan.fsdp.auto_wrap_policy)


@rule("fsdp1-lora-mixed-requires-grad")
def fsdp1_lora_mixed_requires_grad(context: RuleContext) -> Problem | None:
    plan = context.plan
    fsdp = plan.parallelism.fsdp
    if plan.method.lora is None or not _flattens_adapter_with_base(plan):
        return None
    return Problem(value=fsdp.peft_wrap_policy, field=_PEFT_POLICY)


@rule("fsdp1-trained-bias")
def fsdp1_trained_bias(context: RuleContext) -> Problem | None:
    plan = context.plan
    lora = plan.method.lora
    if lora is None or lora.bias is LoraBias.NONE or not is_one_flat_parameter(plan.parallelism.fsdp):
        return None
    return Problem(value=lora.bias, field=_BIAS)


@rule("fsdp1-dora-orig-params")
def fsdp1_dora_orig_params(context: RuleContext) -> Problem | None:
    plan = context.plan
    fsdp = plan.parallelism.fsdp
    if not reads_sharded_weights(plan.method.type, fsdp):
        return None
    return Problem(value=fsdp.use_orig_params, field=_ORIG_PARAMS)


@rule("fsdp1-adapter-unit")
def fsdp1_adapter_unit(context: RuleContext) -> Problem | None:
    kind, fsdp = context.spec.method.type, context.plan.parallelism.fsdp
    if METHODS[kind].family is not Family.OTHER or not _flattens_adapter_with_base(context.plan):
        return None
    field = _PEFT_POLICY if fsdp.peft_wrap_policy else _ORIG_PARAMS
    return Problem(
        value=fsdp.peft_wrap_policy if field == _PEFT_POLICY else fsdp.use_orig_params,
        message=f"the parameters of {kind} are not modules that PEFT's wrap policy could put into units of their own, and "
        'together with frozen weights they need original parameters: "Must flatten tensors with uniform `requires_grad`"',
        fix=f"remove {_PEFT_POLICY} and {_ORIG_PARAMS}, or use version 2",
        field=field,
        changes={_PEFT_POLICY: None, _ORIG_PARAMS: None},
    )


def _flattens_adapter_with_base(plan: RunPlan) -> bool:
    """Whether trained and frozen parameters would share a flat parameter, even with equal element types."""
    dtype = Dtype.FLOAT32
    return adapter_conflict(plan.method.type, plan.parallelism.fsdp, base=dtype, adapter=dtype) is Conflict.REQUIRES_GRAD
