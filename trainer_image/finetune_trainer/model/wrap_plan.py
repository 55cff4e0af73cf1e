"""Chooses the modules of a model that become FSDP units."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.plan.run_plan import FsdpPlan
from finetune_job.sharding import DEFAULT_MIN_NUM_PARAMS, HeldParameter, deepest_first, large_modules
from finetune_trainer.errors import ConfigError
from finetune_trainer.weights.rounding import dtype_name


def layer_classes(model: nn.Module, given: Collection[str] | None) -> tuple[str, ...]:
    """Return the names of the layer classes to wrap, sorted.

    `given`: the plan's names, each of which must exist in the model; None: the model's `_no_split_modules` that occur in it, or
    else the class of the first element of its longest ModuleList. Raises ConfigError.
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
    """Return names of the modules that become units, children before parents. The root, always a unit, is not listed.

    Raises ConfigError if the plan names a class whose modules cannot be units.
    """
    modules = dict(model.named_modules())
    bound = bound_modules(model)
    if fsdp.auto_wrap_policy is AutoWrapPolicy.NO_WRAP:
        chosen: list[str] = []
    elif fsdp.auto_wrap_policy is AutoWrapPolicy.SIZE_BASED_WRAP:
        sizes = ((name, parameter.numel()) for name, parameter in model.named_parameters())
        chosen = large_modules(sizes, fsdp.min_num_params or DEFAULT_MIN_NUM_PARAMS, lambda name, _: name in bound)
    else:
        wanted = set(layer_classes(model, fsdp.transformer_layer_cls_to_wrap))
        chosen = [name for name, module in modules.items() if name and type(module).__name__ in wanted]
        unfit = [name for name in chosen if name in bound]
        if unfit and fsdp.transformer_layer_cls_to_wrap is not None:
            kind = type(modules[unfit[0]]).__name__
            raise ConfigError(
                f"spec.parallelism.fsdp.transformerLayerClsToWrap: {kind}: {unfit[0]} cannot be a unit, because "
                f"{bound[unfit[0]]}",
                f"leave it unset, or name {', '.join(sorted({*wanted} - {kind}) or layer_classes(model, None))} alone",
            )
        chosen = [name for name in chosen if name not in bound]
    if fsdp.peft_wrap_policy:
        leaves = [name for name, module in modules.items() if name and _is_trainable_leaf(module)]
        unfit_leaves = _sharing(model)
        chosen += [name for name in leaves if name not in chosen and name not in unfit_leaves]
    return sorted(chosen, key=deepest_first)


def held_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> list[HeldParameter]:
    """Return the parameters in the form that the sharding rules use. `remove_duplicate`: list tied parameters only once."""
    return [
        HeldParameter(name, dtype_name(parameter.dtype), parameter.requires_grad)
        for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate)
    ]


def bound_modules(model: nn.Module) -> dict[str, str]:
    """Return modules that cannot be units -> the reason. FSDP gathers a unit's weights only when its module is called."""
    bound: dict[str, str] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, AuxiliaryTrainingWrapper | ParamWrapper) and not isinstance(module, ModulesToSaveWrapper):
            bound |= dict.fromkeys(_below(name, modules), f"{name} reads the module's weights without a call")
        elif isinstance(module, BaseTunerLayer) and not (isinstance(module, LoraLayer) and not any(module.use_dora.values())):
            bound |= dict.fromkeys(_below(f"{name}.base_layer", modules), f"{name} reads the module's weights without a call")
        if isinstance(module, nn.ParameterDict | nn.ParameterList | nn.ModuleDict | nn.ModuleList):
            bound[name] = "it is never called"
    return bound | _sharing(model)


def _below(name: str, modules: Iterable[str]) -> list[str]:
    return [other for other in modules if other == name or other.startswith(f"{name}.")]


def _sharing(model: nn.Module) -> dict[str, str]:
    """Return modules that share a parameter with an outside module -> why they cannot be units: only one unit can hold it."""
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    shared = [names for names in places.values() if len(names) > 1]
    reasons: dict[str, str] = {}
    if not shared:
        return reasons
    names_of: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names_of.setdefault(id(module), []).append(name)
    for name, module in model.named_modules():
        for names in shared:
            outside = [place for place in names if not any(place.startswith(f"{own}.") for own in names_of[id(module)])]
            if name and outside and len(outside) < len(names):
                reasons[name] = f"it shares a weight with {outside[0].rpartition('.')[0]}"
    return reasons


def _is_trainable_leaf(module: nn.Module) -> bool:
    """Apply PEFT's rule: the module has no child modules, and its weight is trained."""
    weight = getattr(module, "weight", None)
    return not any(True for _ in module.children()) and isinstance(weight, nn.Parameter) and weight.requires_grad
