"""Conditions on the method and its settings."""

from __future__ import annotations

from finetune_job.methods import METHODS, Family
from finetune_job.rules.cel.condition import Condition, kinds, words
from finetune_job.rules.method_configuration import lora

_NOT_SUPPORTED = words([str(kind) for kind, method in METHODS.items() if method.refused])


def _lora(rule: str, name: str, holds: str, says: str) -> Condition:
    """A condition on a setting of `method.lora`, which only the methods that take it are judged by."""
    field = f"self.lora.{name}"
    guard = f"!has(self.lora) || !(self.type in {kinds(Family.LORA)}) || !has({field})"
    return Condition(rule, "method", f"{guard} || {holds.replace('SETTING', field)}", says, f"lora.{name}")


def _module_names(name: str) -> Condition:
    return _lora(
        "module-name-malformed",
        name,
        "SETTING.all(one, !one.matches('^$|[ \\t\\n\\r,]'))",
        f"{name} holds one module name per item, without blanks and commas",
    )


CONDITIONS: tuple[Condition, ...] = (
    Condition(
        "method-not-supported",
        "method",
        f"!(self.type in {_NOT_SUPPORTED})",
        "this method is not supported; `finetune explain method-not-supported` lists those that are",
        "type",
    ),
    Condition(
        "lora-settings-misplaced",
        "method",
        f"!has(self.lora) || self.type in {kinds(Family.LORA)}",
        f"only {', '.join(str(kind) for kind, method in METHODS.items() if method.family is Family.LORA)} take lora; "
        "other methods take settings",
        "lora",
    ),
    Condition(
        "method-settings-misplaced",
        "method",
        f"!has(self.settings) || !(self.type in {kinds(Family.LORA, Family.FULL)})",
        "this method takes no settings; LoRA, QLoRA and DoRA take lora",
        "settings",
    ),
    Condition(
        "quantization-without-qlora",
        "method",
        "!has(self.quantization) || self.type == 'QLoRA'",
        "only QLoRA has a quantised base; remove quantization, or set type to QLoRA",
        "quantization",
    ),
    _lora(
        "lora-init-not-supported",
        "initLoraWeights",
        f"!(SETTING in {words([str(init) for init in lora.REFUSED_INITS])})",
        "this way to start an adapter is not supported; remove initLoraWeights",
    ),
    _lora(
        "orthogonal-odd-rank",
        "initLoraWeights",
        "SETTING != 'orthogonal' || self.lora.r % 2 == 0 || has(self.lora.rankPattern)",
        "an orthogonal start needs an even rank",
    ),
    _lora(
        "all-linear-beside-names",
        "targetModules",
        "SETTING.size() == 1 || !('all-linear' in SETTING)",
        "all-linear means something only alone",
    ),
    _lora(
        "layers-without-targets",
        "layersToTransform",
        "has(self.lora.targetParameters) || (has(self.lora.targetModules) && self.lora.targetModules != ['all-linear'])",
        "layersToTransform needs names in targetModules",
    ),
    _module_names("targetModules"),
    _module_names("modulesToSave"),
    *(
        _lora(row.rule, name, row.bounds.cel("SETTING"), f"{name} {row.says}")
        for row in lora.RANGES
        for name in (path.rpartition(".")[2] for path in row.fields)
    ),
)
