"""Rules on adapters that target parameters instead of modules, above all the stacked weights of experts."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from finetune_job.api.method import LoraInit, LoraSpec
from finetune_job.methods import METHODS, lora_kind
from finetune_job.rules.rule import Problem, RuleContext, rule

_PARAMETERS = "method.lora.targetParameters"
_DROPOUT, _INIT = "method.lora.loraDropout", "method.lora.initLoraWeights"
_LAYERS, _EXCLUDED = "method.lora.layersToTransform", "method.lora.excludeModules"
_TYPE, _VERSION = "method.type", "parallelism.fsdp.version"


def _lora(context: RuleContext) -> LoraSpec | None:
    """Return the LoRA settings if they adapt parameters, otherwise None."""
    lora = context.spec.method.lora
    return lora if lora is not None and lora.target_parameters else None


@rule("target-parameters-conflict")
def target_parameters_conflict(context: RuleContext) -> Problem | None:
    lora = _lora(context)
    if lora is None:
        return None
    wrong: dict[str, tuple[Any, str, Any]] = {}
    kind = context.spec.method.type
    if METHODS[kind].needs.magnitudes:
        without = lora_kind(packs_base=METHODS[kind].packs_base, magnitudes=False)
        wrong[_TYPE] = (kind, f"{kind} has magnitudes for layers only", without)
    if lora.lora_dropout is not None and Decimal(lora.lora_dropout) != 0:
        wrong[_DROPOUT] = (lora.lora_dropout, "the adapter is added to the weights, so there is no input to drop from", None)
    if lora.init_lora_weights is LoraInit.ORTHOGONAL:
        wrong[_INIT] = (lora.init_lora_weights, "PEFT takes the element type from a layer's weight", None)
    if lora.init_lora_weights.decomposes_base:
        wrong[_INIT] = (lora.init_lora_weights, "it decomposes a layer's weight, and an adapted parameter is not a layer", None)
    if not wrong:
        return None
    field, (value, _, _) = next(iter(wrong.items()))
    steps = [f"set {path} to {instead}" if path == _TYPE else f"remove {path}" for path, (_, _, instead) in wrong.items()]
    return Problem(
        value=value,
        message=f"not with targetParameters: {'; '.join(reason for _, reason, _ in wrong.values())}",
        fix=f"{' and '.join(steps)}, or remove {_PARAMETERS}",
        field=field,
        changes={path: instead for path, (_, _, instead) in wrong.items()},
    )


@rule("target-parameters-all-layers")
def target_parameters_all_layers(context: RuleContext) -> Problem | None:
    lora = _lora(context)
    if lora is None:
        return None
    field: str
    value: Any
    if lora.layers_to_transform is not None:
        field, value = _LAYERS, lora.layers_to_transform
    elif lora.exclude_modules is not None and not lora.target_modules:
        field, value = _EXCLUDED, lora.exclude_modules
    else:
        return None
    changes: dict[str, Any] = {field: None}
    if lora.exclude_modules is not None and not lora.target_modules:
        changes[_EXCLUDED] = None
    return Problem(
        value=value,
        message="PEFT does not look at it for targetParameters: the parameters of all layers silently get adapters",
        fix=f"remove {field}, or {_PARAMETERS}; to choose layers, name their parameters in full, as in "
        "model.layers.0.mlp.experts.down_proj",
        field=field,
        changes=changes,
    )


@rule("fsdp1-target-parameters")
def fsdp1_target_parameters(context: RuleContext) -> Problem | None:
    if _lora(context) is None or context.plan.parallelism.fsdp.version != 1:
        return None
    return Problem(value=1, field=_VERSION)
