"""Checks whether the modules chosen by the wrap plan can be sharded, before torch refuses them when ranks load the model.

The wrap plan itself decides which modules can be units at all (model/wrap_plan.py). model_checks.py calls this with the adapted
model on the meta device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from finetune_job.api.method import MethodType
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.methods import INSIDE_PEFT
from finetune_job.plan.run_plan import FsdpPlan, RunPlan
from finetune_job.sharding import (
    Conflict,
    HeldParameter,
    by_unit,
    element_types,
    innermost_unit,
    is_one_flat_parameter,
    unit_conflict,
)
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.wrap_plan import held_parameters, layer_classes, unit_names
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.train.optimizers import treatment

POLICY_FIELD = "spec.parallelism.fsdp.autoWrapPolicy"
CLASSES_FIELD = "spec.parallelism.fsdp.transformerLayerClsToWrap"
_SIZE_FIELD = "spec.parallelism.fsdp.minNumParams"
_VERSION_FIELD = "spec.parallelism.fsdp.version"
_ORIGINAL_FIELD = "spec.parallelism.fsdp.useOrigParams"
ROOT = "the root unit"
LARGE_SHARE, ALL_SHARE = 0.5, 0.99
"""A unit with at least LARGE_SHARE of the layers' parameters is too large, unless the model's own classes give one of similar
size. If the root unit has at least ALL_SHARE, the plan's classes wrap no layer.
"""
WORSE_THAN_OWN = 1.5
"""A unit is too large if its share is at least this many times the largest unit's share with the model's own classes."""


def check_units(seen: ModelInspection) -> list[Finding]:
    """Returns a finding for each kind of mistake, about the first module or parameter with this mistake."""
    model, unit_names, plan = seen.trained.model, seen.trained.units, seen.plan
    if not seen.is_sharded:
        return []
    fsdp = plan.parallelism.fsdp
    modules = dict(model.named_modules())
    units = {name: modules[name] for name in unit_names}
    # Tied parameters are listed under each of their names, because each name may be in a different unit.
    in_units = by_unit(held_parameters(model, remove_duplicate=False), unit_names)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    findings = [
        _without_parameters(units, fsdp),
        *_shapes([(parameter.name, parameters[parameter.name]) for unit in in_units.values() for parameter in unit], plan),
    ]
    if fsdp.version == 2:
        findings += _trained_in_two_types(in_units, plan)
    else:
        findings.append(_treated_differently(model, set(unit_names), plan))
    return [finding for finding in findings if finding is not None]


def check_unit_sizes(seen: ModelInspection) -> Iterator[Finding]:
    """Reports classes or a size in the plan that leave most of the model in one unit, if the model's own classes would not.

    FSDP gathers whole units, so their size matters for memory, whatever classes they have. Only parameters that the
    model's own classes put into units count: embeddings are in the root unit anyway, and can be most of a model.
    """
    model, plan = seen.trained.model, seen.plan
    fsdp = plan.parallelism.fsdp
    classes, policy = fsdp.transformer_layer_cls_to_wrap, fsdp.auto_wrap_policy
    if not seen.is_sharded or policy is AutoWrapPolicy.NO_WRAP:
        return
    if policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP and classes is None:
        return
    by_layer = {"auto_wrap_policy": AutoWrapPolicy.TRANSFORMER_BASED_WRAP, "transformer_layer_cls_to_wrap": None}
    try:
        own = unit_names(model, fsdp.model_copy(update=by_layer))
    except ConfigError:
        # The model itself names no classes, so no better choice is known.
        return
    largest, share = _largest_unit(model, seen.trained.units, own)
    _, best_share = _largest_unit(model, own, own)
    wraps_no_layer = bool(classes) and not largest and share >= ALL_SHARE
    if not wraps_no_layer and (share < LARGE_SHARE or share < WORSE_THAN_OWN * best_share):
        return
    layers = ", ".join(layer_classes(model, None))
    field, value, changes = CLASSES_FIELD, ", ".join(classes or ()), {CLASSES_FIELD: None}
    fix = f"remove transformerLayerClsToWrap, or name {layers}"
    if policy is AutoWrapPolicy.SIZE_BASED_WRAP:
        field, value, changes = POLICY_FIELD, policy.value, {POLICY_FIELD: None, _SIZE_FIELD: None}
        fix = "remove autoWrapPolicy, so that layers are the units, or set minNumParams to the parameters of one layer"
    yield make_finding(
        "unit-holds-most-of-the-model",
        severity="error" if wraps_no_layer else "warning",
        field=field,
        value=value,
        message=f"{largest or ROOT} is one FSDP unit with {share:.0%} of the layers' parameters, which every rank gathers whole, "
        f"as with autoWrapPolicy: NO_WRAP; with {layers} the largest unit holds {best_share:.0%}",
        fix=fix,
        changes=changes,
    )


def _largest_unit(model: nn.Module, units: Collection[str], own: Collection[str]) -> tuple[str, float]:
    """Returns the unit with the most parameters within `own` units (empty for the root), and its share of these parameters."""
    names, layers, sizes = frozenset(units), frozenset(own), Counter[str]()
    for name, parameter in model.named_parameters():
        if innermost_unit(name, layers):
            sizes[innermost_unit(name, names)] += parameter.numel()
    ((largest, size),) = sizes.most_common(1)
    return largest, size / sizes.total()


def check_stacked_weights(seen: ModelInspection) -> Iterator[Finding]:
    """Reports adapters of stacked weights, which FSDP version 1 cannot train, whatever the units are.

    In some architectures, PEFT adapts stacked weights of experts if the target is all-linear or a name of an expert.
    """
    names = [name for name, module in seen.trained.model.named_modules() if isinstance(module, ParamWrapper)]
    if not names or not seen.is_sharded or seen.plan.parallelism.fsdp.version != 1:
        return
    shown = names[0].removeprefix(INSIDE_PEFT)
    yield make_finding(
        "stacked-experts-under-fsdp1",
        field="spec.method.lora.targetModules",
        value=shown,
        message=f"PEFT adapts stacked weights of {shown} ({len(names)} such adapters) by changing them in the forward pass, and "
        "FSDP 1 holds them as views of one tensor, which may not be changed",
        fix="set parallelism.fsdp.version: 2, or name only modules outside the experts, such as targetModules: [q_proj, k_proj, "
        "v_proj, o_proj]",
        changes={_VERSION_FIELD: None},
    )


def _treated_differently(model: nn.Module, units: set[str], plan: RunPlan) -> Finding | None:
    """Reports flat parameters whose parts need different weight decays or learning rates, which is impossible."""
    if not is_one_flat_parameter(plan.parallelism.fsdp):
        return None
    first: dict[str, tuple[str, tuple[float, float]]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        wanted = treatment(name, tuple(parameter.shape), plan)
        other, treated = first.setdefault(unit := innermost_unit(name, units), (name, wanted))
        if treated == wanted:
            continue
        scales, decays = zip(treated, wanted, strict=True)
        field, what = (
            ("spec.training.weightDecay", f"weight decay, {decays[0]:g} and {decays[1]:g}")
            if decays[0] != decays[1]
            else ("spec.method.lora.loraPlusRatio", f"factors on the learning rate, {scales[0]:g} and {scales[1]:g}")
        )
        changes: dict[str, str | int | None] = {_ORIGINAL_FIELD: True}
        if plan.method.type is not MethodType.FULL:
            # With adapters, FSDP version 1 refuses original parameters in some cases, so the version is also removed.
            changes = {_ORIGINAL_FIELD: None, _VERSION_FIELD: None}
        return make_finding(
            "fsdp1-flat-parameter-mixed",
            field=_ORIGINAL_FIELD,
            value="false",
            message=f"version 1 lays {other} and {name} into one flat parameter ({unit or ROOT}), which is treated as a "
            f"whole, but {field} gives them different {what}",
            fix=f"set {_ORIGINAL_FIELD}: true, or {_VERSION_FIELD}: 2, or leave {field} unset",
            changes=changes,
        )
    return None


def _without_parameters(units: Mapping[str, nn.Module], fsdp: FsdpPlan) -> Finding | None:
    wrong = [name for name, module in units.items() if not any(True for _ in module.parameters())]
    if not wrong:
        return None
    empty = {type(units[name]).__name__ for name in wrong}
    kinds = ", ".join(sorted(empty))
    message = f"{len(wrong)} units hold no parameter (first {wrong[0]}), so there is nothing in them to shard"
    fix = f"remove {kinds} from the list"
    field, changes = POLICY_FIELD, None
    if fsdp.transformer_layer_cls_to_wrap:
        left = [name for name in fsdp.transformer_layer_cls_to_wrap if name not in empty]
        field, changes = CLASSES_FIELD, {CLASSES_FIELD: left or None}
    return make_finding("unit-without-parameters", field=field, value=kinds, message=message, fix=fix, changes=changes)


def _shapes(parameters: Sequence[tuple[str, nn.Parameter]], plan: RunPlan) -> Iterator[Finding]:
    one_rank: dict[str, int | None] = {"spec.parallelism.nodes": 1, "spec.parallelism.processesPerNode": 1}
    if plan.parallelism.min_nodes is not None:
        # An elastic gang needs more than one node, so on one rank this setting is removed.
        one_rank["spec.parallelism.elastic"] = None
    for wrong, reason in (
        ([name for name, parameter in parameters if parameter.ndim == 0], "is a scalar"),
        ([name for name, parameter in parameters if not parameter.is_contiguous()], "is not contiguous in memory"),
    ):
        if wrong:
            yield make_finding(
                "parameter-not-shardable",
                field="spec.parallelism",
                value=wrong[0],
                message=f"{wrong[0]} {reason}, and FSDP cannot shard such parameters ({len(wrong)} of them)",
                fix="train on one rank (nodes: 1, processesPerNode: 1), or choose another model",
                changes=one_rank,
            )


def _trained_in_two_types(in_units: Mapping[str, Sequence[HeldParameter]], plan: RunPlan) -> Iterator[Finding]:
    fix = "set training.precision: fp32, or model.dtype: float32"
    changes: dict[str, str | bool] = {"spec.training.precision": "fp32"}
    lora = plan.method.lora
    if lora is not None and plan.method.quantization is not None and not lora.autocast_adapter_dtype:
        # Adapters then have the compute type of packed weights, but magnitudes have the type of the unpacked weights.
        fix, changes = "set method.lora.autocastAdapterDtype: true", {"spec.method.lora.autocastAdapterDtype": True}
    for unit, parameters in in_units.items():
        if unit_conflict(parameters, plan.parallelism.fsdp) is Conflict.TRAINED_TYPES:
            kinds = element_types(parameter for parameter in parameters if parameter.is_trained)
            examples = " and ".join(f"{name} in {kind}" for kind, name in sorted(kinds.items()))
            yield make_finding(
                "trained-in-two-types",
                field="spec.parallelism.fsdp",
                value=", ".join(sorted(kinds)),
                message=f"{unit or ROOT} trains {examples}, and FSDP 2 reduces the gradients of a unit in one element type",
                fix=fix,
                changes=changes,
            )
            return
