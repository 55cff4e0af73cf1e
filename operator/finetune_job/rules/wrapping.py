"""Which modules become FSDP units."""

from __future__ import annotations

import re

from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import Problem, rule
from finetune_job.rules.effective import effective_plan
from finetune_job.rules.rule import Reproduction

_CLASSES = "parallelism.fsdp.transformerLayerClsToWrap"
_POLICY = "parallelism.fsdp.autoWrapPolicy"
_MIN_PARAMS = "parallelism.fsdp.minNumParams"
_PEFT_POLICY = "peft: peft/utils/other.py, fsdp_auto_wrap_policy"
_ACCELERATE_POLICY = "accelerate: accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin.set_auto_wrap_policy"


def _class_names(written: list[str]) -> list[str] | None:
    """The class names that were probably meant, or None where there are none."""
    parts = [part.rsplit(".", 1)[-1] for text in written for part in re.split(r"[\s,]+", text)]
    return list(dict.fromkeys(part for part in parts if part.isidentifier())) or None


@rule(
    "wrap-class-list-empty",
    "An empty list of layer classes leaves the whole model in one unit",
    reads=(_CLASSES,),
    sources=(_PEFT_POLICY, _ACCELERATE_POLICY),
    reproduction=Reproduction(
        "tests/pitfalls/test_wrapping.py::test_blank_names_wrap_no_layer_without_a_word",
        "no error: one unit holds the whole model, which every rank gathers in every step",
    ),
    holds_for="peft >= 0.14, accelerate >= 1.0",
)
def wrap_class_list_empty(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.transformer_layer_cls_to_wrap
    if written is None or written:
        return None
    return Problem(
        field=_CLASSES,
        value=written,
        message="no layer would become a unit of its own: every rank would gather the whole base model in every step",
        fix="leave the field out: the model's own layer classes are found in preflight; or name them, as in [LlamaDecoderLayer]",
        changes={_CLASSES: None},
    )


@rule(
    "wrap-class-name-blank",
    "A blank layer class name is skipped without a word",
    reads=(_CLASSES,),
    sources=(_PEFT_POLICY, _ACCELERATE_POLICY),
    reproduction=Reproduction(
        "tests/pitfalls/test_wrapping.py::test_blank_names_wrap_no_layer_without_a_word",
        "no error: the blank name is skipped and no layer becomes a unit",
    ),
    holds_for="peft >= 0.14 skips it, older peft and accelerate raise",
)
def wrap_class_name_blank(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.transformer_layer_cls_to_wrap or []
    if all(name.strip() for name in written):
        return None
    return Problem(
        field=_CLASSES,
        value=written,
        message="a blank name matches no class: it is skipped in silence, and a list of blank names wraps no layer at all",
        fix="leave the field out, or name the classes, as in [LlamaDecoderLayer]",
        changes={_CLASSES: _class_names(written)},
    )


@rule(
    "wrap-class-name-malformed",
    "A layer class name with spaces, commas or dots matches no class",
    reads=(_CLASSES,),
    sources=(_PEFT_POLICY, _ACCELERATE_POLICY),
    reproduction=Reproduction(
        "tests/pitfalls/test_wrapping.py::test_unknown_and_spaced_names_are_refused_by_peft",
        "Could not find the transformer layer class to wrap in the model",
    ),
    holds_for="peft >= 0.14, accelerate >= 1.0",
)
def wrap_class_name_malformed(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.transformer_layer_cls_to_wrap or []
    wrong = [name for name in written if name.strip() and not name.isidentifier()]
    if not wrong:
        return None
    return Problem(
        field=_CLASSES,
        value=written,
        message=f'"{wrong[0]}" is not the name of a class: names are compared whole, and blanks and commas are not taken off',
        fix="write one bare class name per item, as in [LlamaDecoderLayer]",
        changes={_CLASSES: _class_names(written)},
    )


@rule(
    "wrap-class-without-transformer-policy",
    "Layer classes have no effect under this wrap policy",
    severity="warning",
    reads=(_CLASSES, _POLICY),
    sources=(_ACCELERATE_POLICY,),
    holds_for="accelerate >= 1.0 and this trainer",
)
def wrap_class_without_transformer_policy(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.transformer_layer_cls_to_wrap
    policy = effective_plan(context).parallelism.fsdp.auto_wrap_policy
    if not written or policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
        return None
    return Problem(
        field=_CLASSES,
        value=written,
        message=f"NoEffect: {policy} does not look at class names",
        fix=f"remove the field, or set {_POLICY} to TRANSFORMER_BASED_WRAP",
        changes={_CLASSES: None},
    )


@rule(
    "min-num-params-without-size-policy",
    "The smallest unit size has no effect without SIZE_BASED_WRAP",
    severity="warning",
    reads=(_MIN_PARAMS, _POLICY),
    sources=(_ACCELERATE_POLICY,),
    holds_for="accelerate >= 1.0 and this trainer",
)
def min_num_params_without_size_policy(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.min_num_params
    policy = effective_plan(context).parallelism.fsdp.auto_wrap_policy
    if written is None or policy is AutoWrapPolicy.SIZE_BASED_WRAP:
        return None
    return Problem(
        field=_MIN_PARAMS,
        value=written,
        message=f"NoEffect: {policy} does not look at sizes",
        fix=f"remove the field, or set {_POLICY} to SIZE_BASED_WRAP",
        changes={_MIN_PARAMS: None},
    )


@rule(
    "no-wrap-gathers-everything",
    "Without a wrap policy every rank gathers the whole model",
    severity="warning",
    reads=(_POLICY,),
    sources=("torch: torch/distributed/fsdp, one unit for all parameters that no policy claims",),
    holds_for="torch >= 2.0",
)
def no_wrap_gathers_everything(context: RuleContext) -> Problem | None:
    plan = effective_plan(context).parallelism
    if plan.fsdp.auto_wrap_policy is not AutoWrapPolicy.NO_WRAP or plan.world_size == 1:
        return None
    return Problem(
        field=_POLICY,
        value=plan.fsdp.auto_wrap_policy,
        message="the model is one unit: each rank holds all of it during every step, so sharding saves no peak memory",
        fix="remove the field: a unit per layer is the default",
        changes={_POLICY: None},
    )


RULES = (
    wrap_class_list_empty,
    wrap_class_name_blank,
    wrap_class_name_malformed,
    wrap_class_without_transformer_policy,
    min_num_params_without_size_policy,
    no_wrap_gathers_everything,
)
