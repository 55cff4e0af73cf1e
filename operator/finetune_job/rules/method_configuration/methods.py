"""Rules on which methods are supported, and where their settings belong."""

from __future__ import annotations

from finetune_job.methods import METHODS, Family
from finetune_job.rules.rule import Problem, RuleContext, rule
from finetune_job.unsupported_methods import UNSUPPORTED

_TYPE = "method.type"
_LORA = "method.lora"
_SETTINGS = "method.settings"


@rule("method-not-supported")
def method_not_supported(context: RuleContext) -> Problem | None:
    kind = context.spec.method.type
    if kind not in UNSUPPORTED:
        return None
    reason, nearest = UNSUPPORTED[kind].reason, UNSUPPORTED[kind].nearest
    return Problem(
        value=kind,
        message=f"{kind} is not supported: {reason}",
        fix=f"set {_TYPE} to {nearest}, which is nearest to it, and remove {_SETTINGS}",
        changes={_TYPE: nearest, _SETTINGS: None},
    )


@rule("lora-settings-misplaced")
def lora_settings_misplaced(context: RuleContext) -> Problem | None:
    method = context.spec.method
    if METHODS[method.type].family is Family.LORA or method.lora is None:
        return None
    if METHODS[method.type].family is Family.FULL:
        reason, instead = "Full trains every weight", ""
    else:
        reason, instead = f"{method.type} is not a variant of LoRA", f", or write them as {_SETTINGS}"
    return Problem(
        value="set",
        message=f"{reason}; these settings would be ignored",
        fix=f"remove {_LORA}{instead}, or set {_TYPE} to LoRA",
        field=_LORA,
    )


@rule("method-settings-misplaced")
def method_settings_misplaced(context: RuleContext) -> Problem | None:
    method = context.spec.method
    family = METHODS[method.type].family
    if family is Family.OTHER or method.settings is None:
        return None
    instead = f"write them as {_LORA}" if family is Family.LORA else f"remove {_SETTINGS}"
    return Problem(
        value="set",
        message=f"{method.type} does not read them; they would be ignored",
        fix=f"{instead}, or choose the method that they belong to",
        field=_SETTINGS,
    )
