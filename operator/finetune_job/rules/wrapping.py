"""Which modules become FSDP units, and what one unit can hold."""

from __future__ import annotations

import re

from finetune_job.api.enumerations import Dtype
from finetune_job.api.method import LoraBias
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.methods import METHODS, Family
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.rule import Problem, Reproduction, RuleContext, rule
from finetune_job.sharding import Conflict, adapter_conflict, is_one_flat_parameter, reads_sharded_weights

_CLASSES = "parallelism.fsdp.transformerLayerClsToWrap"
_POLICY = "parallelism.fsdp.autoWrapPolicy"
_MIN_PARAMS = "parallelism.fsdp.minNumParams"
_PEFT_WRAPS = "peft: peft/utils/other.py, fsdp_auto_wrap_policy"
_ACCELERATE_POLICY = "accelerate: accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin.set_auto_wrap_policy"
_PEFT_POLICY = "parallelism.fsdp.peftWrapPolicy"
_ORIG_PARAMS = "parallelism.fsdp.useOrigParams"
_BIAS = "method.lora.bias"
_TYPE = "method.type"
_VERSION = "parallelism.fsdp.version"


def _class_names(written: list[str]) -> list[str] | None:
    """The class names that were probably meant, or None where there are none."""
    parts = [part.rsplit(".", 1)[-1] for text in written for part in re.split(r"[\s,]+", text)]
    return list(dict.fromkeys(part for part in parts if part.isidentifier())) or None


@rule(
    "wrap-class-list-empty",
    "An empty list of layer classes leaves the whole model in one unit",
    reads=(_CLASSES,),
    sources=(_PEFT_WRAPS, _ACCELERATE_POLICY),
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
    sources=(_PEFT_WRAPS, _ACCELERATE_POLICY),
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
    sources=(_PEFT_WRAPS, _ACCELERATE_POLICY),
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
    reproduction=Reproduction(
        "tests/pitfalls/test_no_effect.py::test_a_wrap_policy_looks_at_settings_of_its_own",
        "no error: the units are the same with and without it",
    ),
    holds_for="accelerate >= 1.0 and this trainer",
)
def wrap_class_without_transformer_policy(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.transformer_layer_cls_to_wrap
    policy = context.plan.parallelism.fsdp.auto_wrap_policy
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
    reproduction=Reproduction(
        "tests/pitfalls/test_no_effect.py::test_a_wrap_policy_looks_at_settings_of_its_own",
        "no error: the units are the same with and without it",
    ),
    holds_for="accelerate >= 1.0 and this trainer",
)
def min_num_params_without_size_policy(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.min_num_params
    policy = context.plan.parallelism.fsdp.auto_wrap_policy
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
    reproduction=Reproduction(
        "tests/pitfalls/test_no_effect.py::test_without_a_policy_every_rank_gathers_all",
        "no error: the model is one unit, and no layer is one",
    ),
    holds_for="torch >= 2.0",
)
def no_wrap_gathers_everything(context: RuleContext) -> Problem | None:
    plan = context.plan.parallelism
    if plan.fsdp.auto_wrap_policy is not AutoWrapPolicy.NO_WRAP or plan.world_size == 1:
        return None
    return Problem(
        field=_POLICY,
        value=plan.fsdp.auto_wrap_policy,
        message="the model is one unit: each rank holds all of it during every step, so sharding saves no peak memory",
        fix="remove the field: a unit per layer is the default",
        changes={_POLICY: None},
    )


@rule(
    "fsdp1-lora-mixed-requires-grad",
    "FSDP 1 cannot flatten frozen and trainable parameters together",
    reads=("parallelism.fsdp.version", _PEFT_POLICY, _ORIG_PARAMS, _POLICY, _CLASSES, "method.type"),
    sources=(
        "torch: torch/distributed/fsdp/_flat_param.py, _init_metadata; _wrap_utils.py, _check_nested_wrapping",
        "peft: docs/source/accelerate/fsdp.md",
    ),
    reproduction=Reproduction(
        "tests/pitfalls/test_trainable.py::test_lora_in_flat_units_fails_without_pefts_policy",
        "ValueError: Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`",
    ),
    holds_for="torch >= 2.0, FSDP 1 only",
)
def fsdp1_lora_mixed_requires_grad(context: RuleContext) -> Problem | None:
    plan = context.plan
    fsdp = plan.parallelism.fsdp
    if plan.method.lora is None or not _flattens_adapter_with_base(plan):
        return None
    return Problem(
        field=_PEFT_POLICY,
        value=fsdp.peft_wrap_policy,
        message="with useOrigParams false each unit becomes one flat parameter, which is trainable or frozen as a whole; without "
        'PEFT\'s wrap policy a layer mixes both: "Must flatten tensors with uniform `requires_grad`"',
        fix=f"set {_PEFT_POLICY} to true, or {_ORIG_PARAMS} to true, or use version 2",
        changes={_PEFT_POLICY: True},
    )


@rule(
    "fsdp1-trained-bias",
    "FSDP 1 cannot flatten a trained bias with its frozen weight",
    severity="warning",
    reads=("parallelism.fsdp.version", _ORIG_PARAMS, _BIAS),
    sources=("torch: torch/distributed/fsdp/_flat_param.py, _init_metadata", "peft: docs of LoraConfig.bias"),
    reproduction=Reproduction(
        "tests/pitfalls/test_trainable.py::test_trained_bias_fails_where_the_model_has_biases",
        "ValueError: Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`",
    ),
    holds_for="torch >= 2.0, FSDP 1 only, models whose layers have biases",
)
def fsdp1_trained_bias(context: RuleContext) -> Problem | None:
    plan = context.plan
    lora = plan.method.lora
    if lora is None or lora.bias is LoraBias.NONE or not is_one_flat_parameter(plan.parallelism.fsdp):
        return None
    return Problem(
        field=_BIAS,
        value=lora.bias,
        message="a trained bias shares its module with a frozen weight, which no wrap policy can part: a model whose layers have "
        "biases fails with useOrigParams false; preflight looks at the model",
        fix=f"set {_BIAS} to none, or use version 2",
        changes={_BIAS: "none"},
    )


@rule(
    "fsdp1-dora-orig-params",
    "DoRA reads adapter weights outside their unit, where FSDP 1 holds a flat shard",
    reads=("parallelism.fsdp.version", _PEFT_POLICY, _ORIG_PARAMS, "method.type"),
    sources=("peft: peft/tuners/lora/dora.py, DoraLinearLayer.forward", "peft: issues 1737 and 1910, pull request 1806"),
    reproduction=Reproduction(
        "tests/pitfalls/test_dora.py::test_original_parameters_in_leaf_units_fail", "IndexError: tuple index out of range"
    ),
    holds_for="peft >= 0.12, FSDP 1 only; hidden with one rank, where nothing is sharded",
)
def fsdp1_dora_orig_params(context: RuleContext) -> Problem | None:
    plan = context.plan
    fsdp = plan.parallelism.fsdp
    if not reads_sharded_weights(plan.method.type, fsdp):
        return None
    return Problem(
        field=_ORIG_PARAMS,
        value=fsdp.use_orig_params,
        message="PEFT's wrap policy puts each adapter matrix into a unit of its own, and with useOrigParams true its weight is a "
        'one-dimensional shard outside the unit\'s forward, where DoRA reads its shape: "IndexError: tuple index out of range"',
        fix=f"set {_ORIG_PARAMS} to false and keep {_PEFT_POLICY} true, or use version 2",
        changes={_ORIG_PARAMS: False},
    )


@rule(
    "fsdp1-adapter-unit",
    "FSDP 1 keeps these adapters in their layer's unit",
    reads=(_TYPE, _VERSION, _PEFT_POLICY, _ORIG_PARAMS, _POLICY, _CLASSES),
    sources=("torch: torch/distributed/fsdp/_flat_param.py, _init_metadata", "peft: peft/utils/other.py, fsdp_auto_wrap_policy"),
    reproduction=Reproduction(
        "tests/pitfalls/test_adapter_units.py::test_parameters_that_are_no_modules_need_original_ones",
        "ConfigError: useOrigParams: false cannot shard a layer, which has trained and frozen parameters",
    ),
    holds_for="torch >= 2.0, FSDP 1 only",
)
def fsdp1_adapter_unit(context: RuleContext) -> Problem | None:
    kind, fsdp = context.spec.method.type, context.plan.parallelism.fsdp
    if METHODS[kind].family is not Family.OTHER or not _flattens_adapter_with_base(context.plan):
        return None
    field = _PEFT_POLICY if fsdp.peft_wrap_policy else _ORIG_PARAMS
    return Problem(
        field=field,
        value=fsdp.peft_wrap_policy if field == _PEFT_POLICY else fsdp.use_orig_params,
        message=f"the parameters of {kind} are not modules that PEFT's wrap policy could put into units of their own, and next "
        'to frozen weights they need original parameters: "Must flatten tensors with uniform `requires_grad`"',
        fix=f"remove {_PEFT_POLICY} and {_ORIG_PARAMS}, or use version 2",
        changes={_PEFT_POLICY: None, _ORIG_PARAMS: None},
    )


def _flattens_adapter_with_base(plan: RunPlan) -> bool:
    """Whether trained and frozen parameters would meet in one flat parameter, whatever their element type."""
    held = Dtype.FLOAT32
    return adapter_conflict(plan.method.type, plan.parallelism.fsdp, base=held, adapter=held) is Conflict.REQUIRES_GRAD


RULES = (
    wrap_class_list_empty,
    wrap_class_name_blank,
    wrap_class_name_malformed,
    wrap_class_without_transformer_policy,
    min_num_params_without_size_policy,
    no_wrap_gathers_everything,
    fsdp1_lora_mixed_requires_grad,
    fsdp1_trained_bias,
    fsdp1_dora_orig_params,
    fsdp1_adapter_unit,
)
