"""Which modules of a model become FSDP units."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.plan.run_plan import FsdpPlan
from finetune_trainer.errors import ConfigError

DEFAULT_MIN_NUM_PARAMS = 100_000_000
"""Smallest unit of SIZE_BASED_WRAP in parameters where the plan names none; torch's own default."""


def layer_classes(model: nn.Module, given: Collection[str] | None) -> tuple[str, ...]:
    """Names of the layer classes to wrap, sorted.

    `given`: the plan's names, each of which must exist in the model. Otherwise the model's own `_no_split_modules` that occur in
    it, else the class of the elements of its longest ModuleList. Raises ConfigError.
    """
    present = {type(module).__name__ for module in model.modules()}
    if given is not None:
        unknown = sorted(set(given) - present)
        if unknown or not given:
            raise ConfigError(
                f"spec.parallelism.fsdp.transformerLayerClsToWrap: {unknown or 'an empty list'} names no class of this model",
                f"leave it unset, or use {', '.join(layer_classes(model, None))}; it has {', '.join(sorted(present))}",
            )
        return tuple(sorted(set(given)))
    own: set[str] = set()
    for module in model.modules():
        own.update(getattr(module, "_no_split_modules", None) or ())
    if own & present:
        return tuple(sorted(own & present))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        raise ConfigError(
            "spec.parallelism.fsdp.transformerLayerClsToWrap: this model names no layer classes and has no list of layers",
            f"name one of its classes: {', '.join(sorted(present))}; or set autoWrapPolicy: NO_WRAP",
        )
    return (type(max(lists, key=len)[0]).__name__,)


def unit_names(model: nn.Module, fsdp: FsdpPlan) -> list[str]:
    """Names of the modules that become units of their own, children before parents; the root, always a unit, is not listed."""
    modules = dict(model.named_modules())
    if fsdp.auto_wrap_policy is AutoWrapPolicy.NO_WRAP:
        chosen: list[str] = []
    elif fsdp.auto_wrap_policy is AutoWrapPolicy.SIZE_BASED_WRAP:
        chosen = _large(modules, fsdp.min_num_params or DEFAULT_MIN_NUM_PARAMS)
    else:
        wanted = set(layer_classes(model, fsdp.transformer_layer_cls_to_wrap))
        chosen = [name for name, module in modules.items() if name and type(module).__name__ in wanted]
    if fsdp.peft_wrap_policy:
        chosen += [name for name, module in modules.items() if name and name not in chosen and _is_trainable_leaf(module)]
    return sorted(chosen, key=lambda name: (-name.count("."), name))


def _is_trainable_leaf(module: nn.Module) -> bool:
    """PEFT's rule: no child modules and a weight that is trained."""
    weight = getattr(module, "weight", None)
    return not any(True for _ in module.children()) and isinstance(weight, nn.Parameter) and weight.requires_grad


def _large(modules: dict[str, nn.Module], minimum: int) -> list[str]:
    """Deepest modules first: a module is a unit where the parameters that no unit below it holds reach the minimum."""
    chosen: list[str] = []
    for name in sorted(modules, key=lambda name: (-(name.count(".") + 1 if name else 0), name)):
        below = [modules[unit] for unit in chosen if unit.startswith(f"{name}.")]
        held = {id(parameter) for unit in below for parameter in unit.parameters()}
        size = sum(parameter.numel() for parameter in modules[name].parameters() if id(parameter) not in held)
        if name and size >= minimum and not isinstance(modules[name], nn.ModuleList | nn.ModuleDict):
            chosen.append(name)
    return chosen
