"""Methods: which are supported, where their settings stand, and what can be done with them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from finetune_job.api.base import Dtype
from finetune_job.api.method import LoraInit, MethodType, is_decimal
from finetune_job.methods import METHODS, Family, Method, supported
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule, shown
from finetune_job.rules.effective import effective_plan, held_dtype

_TYPE = "method.type"
_LORA = "method.lora"
_SETTINGS = "method.settings"
_RATIO = "method.lora.loraPlusRatio"
_INIT = "method.lora.initLoraWeights"
_MERGE = "merge.enabled"
_PEFT_POLICY = "parallelism.fsdp.peftWrapPolicy"
_ORIG_PARAMS = "parallelism.fsdp.useOrigParams"
_VERSION = "parallelism.fsdp.version"
_MEASURED = "this product: tests/unit/trainer_train/test_methods.py"
_MERGED = "this product: tests/unit/trainer_merge/test_methods.py"
_PEFT = "peft 0.21"


@rule(
    "method-not-supported",
    "Not every PEFT method trains right here",
    reads=(_TYPE,),
    sources=(_MEASURED, "peft: docs/source/package_reference"),
    holds_for=_PEFT,
)
def method_not_supported(context: RuleContext) -> Problem | None:
    kind = context.spec.method.type
    if not METHODS[kind].refused:
        return None
    others = ", ".join([*supported(Family.LORA), *supported(Family.FULL), *supported(Family.OTHER)])
    return Problem(
        field=_TYPE,
        value=kind,
        message=f"{kind} is refused: {METHODS[kind].refused}",
        fix=f"set {_TYPE} to one of {others}, and remove {_SETTINGS} where it has none",
        changes={_TYPE: MethodType.LORA, _SETTINGS: None},
    )


@rule(
    "method-on-one-rank-only",
    "Some methods cannot be sharded",
    reads=(_TYPE, "parallelism.nodes", "parallelism.processesPerNode"),
    sources=(_MEASURED,),
    holds_for=_PEFT,
)
def method_on_one_rank_only(context: RuleContext) -> Problem | None:
    kind = context.spec.method.type
    parallelism = context.spec.parallelism
    if not METHODS[kind].one_rank or parallelism.nodes * parallelism.processes_per_node == 1:
        return None
    return Problem(
        field=_TYPE,
        value=kind,
        message=f"{kind} trains on one rank only: {METHODS[kind].one_rank}",
        fix="set parallelism.nodes and parallelism.processesPerNode to 1, or choose another method",
        changes={"parallelism.nodes": 1, "parallelism.processesPerNode": 1},
    )


@rule(
    "lora-settings-misplaced",
    "Only LoRA, QLoRA and DoRA take method.lora",
    reads=(_TYPE, _LORA),
    sources=("this product's API",),
    holds_for=OURS,
)
def lora_settings_misplaced(context: RuleContext) -> Problem | None:
    method = context.spec.method
    if METHODS[method.type].family is Family.LORA or method.lora is None:
        return None
    if METHODS[method.type].family is Family.FULL:
        reason, instead = "Full trains every weight", ""
    else:
        reason, instead = f"{method.type} is no kind of LoRA", f", or write them as {_SETTINGS}"
    return Problem(
        field=_LORA,
        value="set",
        message=f"{reason}; these settings would be ignored",
        fix=f"remove {_LORA}{instead}, or set {_TYPE} to LoRA",
        changes={_LORA: None},
    )


@rule(
    "method-settings-misplaced",
    "LoRA, QLoRA, DoRA and Full take no method.settings",
    reads=(_TYPE, _SETTINGS),
    sources=("this product's API",),
    holds_for=OURS,
)
def method_settings_misplaced(context: RuleContext) -> Problem | None:
    method = context.spec.method
    family = METHODS[method.type].family
    if family is Family.OTHER or method.settings is None:
        return None
    instead = f"write them as {_LORA}" if family is Family.LORA else f"remove {_SETTINGS}"
    return Problem(
        field=_SETTINGS,
        value="set",
        message=f"{method.type} does not read them; they would be ignored",
        fix=f"{instead}, or choose the method that they belong to",
        changes={_SETTINGS: None},
    )


@rule(
    "method-not-mergeable",
    "Not every adapter can be merged",
    reads=(_TYPE, _MERGE),
    sources=(_MERGED, "peft: peft/tuners/lily/layer.py, merge"),
    holds_for=_PEFT,
)
def method_not_mergeable(context: RuleContext) -> Problem | None:
    spec = context.spec
    method: Method = METHODS[spec.method.type]
    if method.merges or method.refused or not spec.merge.enabled:
        return None
    return Problem(
        field=_MERGE,
        value=True,
        message=f"{spec.method.type} adapters cannot be merged: {method.not_merged}; the result is the adapter, which PEFT loads",
        fix=f"set {_MERGE}: false",
        changes={_MERGE: False},
    )


@rule(
    "method-merge-setting",
    "Some adapters can be merged only where they say enough",
    reads=(_TYPE, _SETTINGS, _MERGE),
    sources=(_MERGED, "peft: peft/tuners/unilora/model.py, tinylora/model.py, frod/model.py"),
    holds_for=_PEFT,
)
def method_merge_setting(context: RuleContext) -> Problem | None:
    spec = context.spec
    if not spec.merge.enabled:
        return None
    written = spec.method.settings or {}
    for needed in METHODS[spec.method.type].merge_settings:
        if needed.name in written and _same(written[needed.name], needed.value):
            continue
        if needed.name not in written and needed.is_default:
            continue
        wanted = shown(needed.value) if isinstance(needed.value, bool) else f'"{needed.value}"'
        return Problem(
            field=_SETTINGS,
            value=f"{needed.name} unset" if needed.name not in written else f"{needed.name}: {shown(written[needed.name])}",
            message=f"a {spec.method.type} adapter can be merged only where {needed.name} is {wanted}: {needed.reason}",
            fix=f"set {_SETTINGS}.{needed.name} to {wanted}, or {_MERGE} to false",
            changes={f"{_SETTINGS}.{needed.name}": needed.value},
        )
    return None


def _same(written: Any, needed: bool | str) -> bool:
    if isinstance(needed, bool) or isinstance(written, bool):
        return written is needed
    text = str(written)
    return is_decimal(text) and Decimal(text) == Decimal(needed)


@rule(
    "fsdp1-adapter-unit",
    "FSDP 1 keeps these adapters in their layer's unit",
    reads=(_TYPE, _VERSION, _PEFT_POLICY, _ORIG_PARAMS),
    sources=("torch: torch/distributed/fsdp/_flat_param.py, _init_metadata", "peft: peft/utils/other.py, fsdp_auto_wrap_policy"),
    holds_for="torch >= 2.0, FSDP 1 only",
)
def fsdp1_adapter_unit(context: RuleContext) -> Problem | None:
    kind, fsdp = context.spec.method.type, effective_plan(context).parallelism.fsdp
    if METHODS[kind].family is not Family.OTHER or fsdp.version != 1 or (fsdp.use_orig_params and not fsdp.peft_wrap_policy):
        return None
    if fsdp.peft_wrap_policy and (kind is MethodType.LN_TUNING or (kind is MethodType.OFT and not fsdp.use_orig_params)):
        # What they train are leaf modules with a weight, which that policy makes units of their own.
        return None
    field = _PEFT_POLICY if fsdp.peft_wrap_policy else _ORIG_PARAMS
    return Problem(
        field=field,
        value=fsdp.peft_wrap_policy if field == _PEFT_POLICY else fsdp.use_orig_params,
        message=f"the parameters of {kind} are no modules that PEFT's wrap policy could put into units of their own, and beside "
        'frozen weights they need original parameters: "Must flatten tensors with uniform `requires_grad`"',
        fix=f"remove {_PEFT_POLICY} and {_ORIG_PARAMS}, or use version 2",
        changes={_PEFT_POLICY: None, _ORIG_PARAMS: None},
    )


@rule(
    "fsdp1-adapter-16-bit",
    "FSDP 1 would hold these adapters in 16 bits",
    reads=(_TYPE, _VERSION, "model.dtype", "training.precision"),
    sources=(
        "torch: torch/distributed/fsdp/_flat_param.py, _init_metadata (one element type in a flat parameter)",
        "IEEE 754: a bfloat16 number near 1 has steps of 1/128, larger than usual updates",
    ),
    holds_for="torch >= 2.0, FSDP 1 only",
)
def fsdp1_adapter_16_bit(context: RuleContext) -> Problem | None:
    plan = effective_plan(context)
    kind = plan.method.type
    if METHODS[kind].family is not Family.OTHER or plan.parallelism.fsdp.version != 1:
        return None
    if held_dtype(plan) in (None, Dtype.FLOAT32):
        return None
    return Problem(
        field=_VERSION,
        value=1,
        message=f"adapters of {kind} lie in one flat parameter with base weights in {held_dtype(plan)}, where small updates vanish",
        fix=f"remove {_VERSION}: version 2 holds them in float32; or set training.precision to fp32",
        changes={_VERSION: None},
    )


@rule(
    "lora-plus-ratio-range",
    "LoRA+ lets B learn faster than A",
    reads=(_RATIO,),
    sources=("Hayou, Ghosh and Yu 2024, LoRA+: efficient low rank adaptation of large models",),
    holds_for="every version",
)
def lora_plus_ratio_range(context: RuleContext) -> Problem | None:
    lora = context.spec.method.lora
    written = None if lora is None else lora.lora_plus_ratio
    if written is None or Decimal(written) >= 1:
        return None
    return Problem(
        field=_RATIO,
        value=written,
        message="it is the learning rate of lora_B as a multiple of lora_A's; below 1, B, which starts at zero, would learn slower",
        fix=f'write a ratio such as "16", or remove {_RATIO}',
        changes={_RATIO: None},
    )


_CHANGES_BASE = "it changes the base weights when training starts, so that the adapter no longer belongs to the base model"
REFUSED_INITS = {
    LoraInit.PISSA: _CHANGES_BASE,
    LoraInit.OLORA: _CHANGES_BASE,
    LoraInit.CORDA: _CHANGES_BASE,
    LoraInit.LOFTQ: _CHANGES_BASE,
    LoraInit.EVA: "it wants activations of the training data before the first step, which this trainer does not compute",
}
"""Why a way to start is not supported; the others are."""


@rule(
    "lora-init-not-supported",
    "Some ways to start an adapter change the base",
    reads=(_INIT,),
    sources=("peft: peft/tuners/lora/layer.py, LoraLayer.pissa_init, olora_init, corda_init, loftq_init", "peft: LoraConfig"),
    holds_for=_PEFT,
)
def lora_init_not_supported(context: RuleContext) -> Problem | None:
    lora = context.spec.method.lora
    if lora is None or lora.init_lora_weights not in REFUSED_INITS:
        return None
    return Problem(
        field=_INIT,
        value=lora.init_lora_weights,
        message=f"{lora.init_lora_weights} is refused: {REFUSED_INITS[lora.init_lora_weights]}",
        fix=f"remove {_INIT}, or set it to {', '.join(init for init in LoraInit if init not in REFUSED_INITS)}",
        changes={_INIT: None},
    )


RULES = (
    method_not_supported,
    method_on_one_rank_only,
    lora_settings_misplaced,
    method_settings_misplaced,
    method_not_mergeable,
    method_merge_setting,
    fsdp1_adapter_unit,
    fsdp1_adapter_16_bit,
    lora_plus_ratio_range,
    lora_init_not_supported,
)
