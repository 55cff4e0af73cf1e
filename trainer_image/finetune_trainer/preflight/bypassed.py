"""Checks that the model uses its modules in a way that lets them be adapted, trained, packed or sharded as FSDP units.

inspection/module_use.py observes what the model does with each module. model_checks.py calls this with the trained model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from pydantic.alias_generators import to_snake
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune_job.api.enumerations import MergeBase
from finetune_job.api.method import ALL_LINEAR, MethodType
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.method_settings import known_settings
from finetune_job.methods import INSIDE_PEFT, METHODS, lora_kind
from finetune_job.module_names import ADAPTER
from finetune_job.plan.method_plan import MethodPlan
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.inspection.module_use import ModuleUse, ModuleUses
from finetune_trainer.preflight.adapted_modules import is_packed
from finetune_trainer.preflight.fsdp_units import CLASSES_FIELD, POLICY_FIELD
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.name_matching import targets

_PEFT_FIELD = "spec.parallelism.fsdp.peftWrapPolicy"
_PARTS_OF_PEFT = frozenset({"base_layer", "original_module", "modules_to_save", "token_adapter", ADAPTER})
_SHOWN, _LISTED = 4, 8
_MOST_NAMES = 256
"""Maximum number of names in a list of a manifest (finetune_job.api.method)."""
_OBSERVED = "(observed on a small model of this architecture)"
_NO_TENSOR = "they do not return a single tensor to which PEFT could add a change"
_LINEAR = (nn.Linear, Conv1D)
Used = Mapping[str, ModuleUse]
"""Name in the base model -> observed use of the module."""


def check_used(seen: ModelInspection) -> list[Finding]:
    """Returns a finding for each kind of mistake in what is trained or packed."""
    model, method, uses = seen.trained.model, seen.plan.method, seen.uses
    adapted, saved, plain = _trained(model, uses)
    linear = _linear(model, uses)
    place = _place(method)
    bypassed = [name for name, use in adapted.items() if use.is_bypassed]
    idle = [name for name, use in adapted.items() if not use.is_bypassed and _is_idle(use)]
    several = [name for name, use in adapted.items() if name in linear and _adds_nowhere(use)]
    findings = []
    if wrong := [*bypassed, *idle, *several]:
        fix, changes = _other_targets(method, wrong, adapted, _working(model, uses))
        for rule, names, reason in (
            ("adapter-bypassed", bypassed, _why_bypassed),
            ("trained-without-gradient", idle, lambda use: f"{_why_idle(use)}, so adapters there would learn nothing"),
            ("target-gives-no-tensor", several, lambda _: f"{_NO_TENSOR} {_OBSERVED}"),
        ):
            if names:
                message, value = f"{_shown(names)}: {reason(adapted[names[0]])}", _listed(endings(names, adapted))
                field = f"{place}.targetModules"
                findings.append(make_finding(rule, field=field, value=value, message=message, fix=fix, changes=changes))
    if still := [name for name, use in saved.items() if not use.is_bypassed and _is_idle(use)]:
        field, value = f"{place}.modulesToSave", _listed(endings(still, saved))
        findings.append(
            make_finding(
                "trained-without-gradient",
                field=field,
                value=value,
                message=f"{_shown(still)}: {_why_idle(saved[still[0]])}, so the copy that is trained would never change",
                fix=f"remove {value} from the list",
                changes=_without_saved(method, field, still, saved),
            )
        )
    if without := [name for name, use in plain.items() if not use.gets_gradient]:
        is_whole, field = method.type is MethodType.FULL, f"{place}.bias"
        findings.append(
            make_finding(
                "trained-without-gradient",
                field="spec.method.type" if is_whole else field,
                value=method.type.value if is_whole else _listed(endings(without, plain)),
                message=f"parameters of {_shown(without)} are trained, and no pass over text gives them a gradient: they would "
                "never change",
                fix="use method.type: LoRA with targetModules that text uses, or a checkpoint of the language model alone"
                if is_whole
                else f"set {field}: none",
                changes=None if is_whole else {field: "none"},
            )
        )
    if method.quantization is not None:
        findings += _packed(seen.plan, model, uses)
    return findings


def check_units_used(seen: ModelInspection) -> list[Finding]:
    """Reports FSDP units whose weights are read while they are not called: FSDP gathers weights only during a call."""
    plan = seen.plan
    if not seen.is_sharded:
        return []
    wrong = {name: use for name in seen.trained.units if (use := seen.uses.of(base_name(name))) is not None and use.readers}
    if not wrong:
        return []
    first, use = next(iter(wrong.items()))
    fsdp = plan.parallelism.fsdp
    field = CLASSES_FIELD if fsdp.transformer_layer_cls_to_wrap else POLICY_FIELD
    fix = f"leave {POLICY_FIELD} and {CLASSES_FIELD} out"
    changes: dict[str, Any] = {}
    if fsdp.auto_wrap_policy is not AutoWrapPolicy.TRANSFORMER_BASED_WRAP or fsdp.transformer_layer_cls_to_wrap:
        changes = {POLICY_FIELD: None, CLASSES_FIELD: None}
    if fsdp.peft_wrap_policy and not plan.method.trains_adapter:
        # With peftWrapPolicy, each weight of the base is a unit, whatever the other policy is, so this setting is changed.
        field, fix, changes = _PEFT_FIELD, f"set {_PEFT_FIELD}: false", {_PEFT_FIELD: False}
    return [
        make_finding(
            "unit-bypassed",
            field=field,
            value=first,
            message=f"{len(wrong)} modules to be FSDP units, such as {first}, are not called: {use.readers[0]} reads their "
            "weights itself, and would find shards there",
            fix=f"{fix}, so that whole layers are the units",
            changes=changes,
        )
    ]


def bypassed_linear(model: nn.Module, uses: ModuleUses) -> list[str]:
    """Returns the name endings of the linear layers on which adapters do not work."""
    linear = _linear(model, uses)
    return endings([name for name, use in linear.items() if _is_unfit(use)], linear)


def base_name(name: str) -> str:
    """Returns a module's name without the parts that PEFT adds."""
    parts = name.removeprefix(INSIDE_PEFT).split(".") if name.startswith(INSIDE_PEFT) else name.split(".")
    return ".".join(part for part in parts if part not in _PARTS_OF_PEFT)


def endings(wanted: Collection[str], among: Collection[str]) -> list[str]:
    """Returns the shortest name endings that, by PEFT's rules, match the wanted modules and no other modules in `among`."""
    shortest: list[str] = []
    meant = set(wanted)
    for name in wanted:
        if any(targets(end, name) for end in shortest):
            continue
        parts = name.split(".")
        candidates = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        shortest.append(next((end for end in candidates if all(other in meant for other in among if targets(end, other))), name))
    return shortest


def _trained(model: nn.Module, uses: ModuleUses) -> tuple[Used, Used, Used]:
    """Returns the modules with an adapter, the modules with a trained copy, and the modules whose own parameters are trained."""
    adapted: dict[str, ModuleUse] = {}
    saved: dict[str, ModuleUse] = {}
    plain: dict[str, ModuleUse] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        use = uses.of(base_name(name))
        is_peft = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if is_peft:
            inside.append(f"{name}.")
        if use is None:
            continue
        if isinstance(module, ModulesToSaveWrapper):
            saved[base_name(name)] = use
        elif isinstance(module, BaseTunerLayer) and not any(name.startswith(prefix) for prefix in inside[:-1]):
            adapted[base_name(name)] = use
        elif any(parameter.requires_grad for parameter in module.parameters(recurse=False)) and not (
            is_peft or any(name.startswith(prefix) and ".base_layer" not in name for prefix in inside)
        ):
            plain[base_name(name)] = use
    return adapted, saved, plain


def _linear(model: nn.Module, uses: ModuleUses) -> dict[str, ModuleUse]:
    """Returns the use of each of the model's own linear layers by name, with or without adapters."""
    linear: dict[str, ModuleUse] = {}
    for name, module in model.named_modules():
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if isinstance(base, _LINEAR) and (use := uses.of(base_name(name))) is not None:
            linear[base_name(name)] = use
    return linear


def _working(model: nn.Module, uses: ModuleUses) -> list[str]:
    """Returns the name endings of the linear layers that PEFT accepts and on which adapters work.

    The output layer is left out, as it is by all-linear.
    """
    linear = _linear(model, uses)
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    tuner = getattr(model, "base_model", None)
    if isinstance(model, PeftModel) and isinstance(tuner, BaseTuner):
        base = model.get_base_model()
        head = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
        linear = {name: use for name, use in linear.items() if _is_accepted(tuner, model, name)}
    heads = {base_name(name) for name, module in model.named_modules() if module is head}
    return endings([name for name, use in linear.items() if not (_is_unfit(use) or name in heads)], linear)


def _is_accepted(tuner: BaseTuner, model: PeftModel, name: str) -> bool:
    """Whether PEFT accepts the module as a target. In some architectures it refuses some names."""
    try:
        tuner._check_target_module_compatiblity(model.peft_config[ADAPTER], tuner.model, name.rpartition(".")[2])  # noqa: SLF001
    except ValueError:
        return False
    return True


def _is_idle(use: ModuleUse) -> bool:
    return not (use.is_called and use.gets_gradient)


def _adds_nowhere(use: ModuleUse) -> bool:
    return not (use.is_bypassed or _is_idle(use) or use.gives_tensor)


def _is_unfit(use: ModuleUse) -> bool:
    return use.is_bypassed or _is_idle(use) or _adds_nowhere(use)


def _why_bypassed(use: ModuleUse) -> str:
    if use.is_handed_to:
        return (
            f"transformers hands their weights to {use.is_handed_to[0]} where its package is installed, as it is here: on a GPU, "
            "this kernel computes without the adapter"
        )
    if not use.is_called:
        return (
            f"{use.readers[0]} never calls them and reads their weights itself, so their adapters get no gradient and have no "
            f"effect {_OBSERVED}"
        )
    return (
        f"{use.readers[0]} reads their weights itself besides calling them, so an adapter acts in one place and a merged "
        f"weight in both {_OBSERVED}"
    )


def _why_idle(use: ModuleUse) -> str:
    reason = "the loss does not depend on them" if use.is_called else "no pass over text calls them"
    return f"{reason} {_OBSERVED}"


def _shown(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return f"{', '.join(names[:_SHOWN])}{f' and {rest} more' if rest > 0 else ''}"


def _place(method: MethodPlan) -> str:
    return "spec.method.lora" if method.lora is not None else "spec.method.settings"


def _other_targets(
    method: MethodPlan, wrong: Sequence[str], adapted: Collection[str], good: Sequence[str]
) -> tuple[str, dict[str, list[str]] | None]:
    """Returns a fix, in words and as changes, that removes only the wrong modules. good: names of targets that would work."""
    place, ends = _place(method), endings(wrong, adapted)
    named = _names(method, "targetModules")
    kept = [name for name in named if name == ALL_LINEAR or any(targets(name, module) for module in set(adapted) - set(wrong))]
    rest = [end for end in ends if not any(targets(name, end) for name in named if name not in kept)]
    changes: dict[str, list[str]] = {}
    can_exclude = method.lora is not None or "excludeModules" in known_settings(method.type)
    if set(adapted) <= set(wrong) or (rest and not can_exclude):
        # A module that is excluded or trained whole cannot be a target, so it is not listed as one.
        others = [*_names(method, "excludeModules"), *_names(method, "modulesToSave")]
        changes[f"{place}.targetModules"] = [name for name in good if not any(targets(other, name) for other in others)]
    else:
        if kept != named:
            changes[f"{place}.targetModules"] = kept
        if rest:
            changes[f"{place}.excludeModules"] = [*_names(method, "excludeModules"), *rest]
    if not all(changes.values()):
        return f"name in {place}.targetModules modules that take an adapter and are not in excludeModules or modulesToSave", None
    if any(len(names) > _MOST_NAMES for names in changes.values()):
        return "use a checkpoint of the language model alone, or write targetModules that match only its layers", None
    return " and ".join(f"set {field}: [{', '.join(names)}]" for field, names in changes.items()), changes


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:_LISTED], *(["..."] if len(names) > _LISTED else [])])


def _without_saved(method: MethodPlan, field: str, still: Collection[str], saved: Collection[str]) -> dict[str, Any] | None:
    """Returns the change that removes the modules that never change; None if one of the names also matches a module that does."""
    names = _names(method, "modulesToSave")
    # PEFT matches these names with the ends of module names, even if they begin within a part.
    meant = {name: [module for module in saved if module.endswith(name)] for name in names}
    wrong = [name for name in names if not set(still).isdisjoint(meant[name])]
    if any(not set(still).issuperset(meant[name]) for name in wrong):
        return None
    return {field: [name for name in names if name not in wrong] or None}


def _packed(plan: RunPlan, model: nn.Module, uses: ModuleUses) -> Iterator[Finding]:
    """Reports packed weights that other code reads: they are stored as one column of bytes, which only the layer can use."""
    packed = [name for name, module in model.named_modules() if hasattr(module, "weight") and is_packed(module)]
    wrong = {base_name(name): use for name in packed if (use := uses.of(base_name(name))) is not None and use.is_bypassed}
    if wrong:
        use = next(iter(wrong.values()))
        reader = use.readers[0] if use.readers else f"{use.is_handed_to[0]}, to which transformers hands it here,"
        message = (
            f"{_shown(list(wrong))}: {reader} reads the weight itself as a matrix, but 4-bit packing changes its shape "
            f"{_OBSERVED}"
        )
        kind = lora_kind(packs_base=False, magnitudes=METHODS[plan.method.type].needs.magnitudes).value
        changes = {"spec.method.type": kind, "spec.method.quantization": None}
        if plan.merge.base is not MergeBase.ORIGINAL:
            # Without packed weights, adapters can be merged only into the original base.
            changes["spec.merge.base"] = None
        yield make_finding(
            "packed-weight-read",
            field="spec.method.type",
            value=plan.method.type.value,
            message=message,
            fix=f"set spec.method.type: {kind}",
            changes=changes,
        )


def _names(method: MethodPlan, setting: str) -> list[str]:
    if method.lora is not None:
        names: tuple[str, ...] = getattr(method.lora, to_snake(setting))
        return list(names)
    written: Any = method.adapter.settings.get(setting) if method.adapter is not None else None
    if isinstance(written, list):
        return [name for name in written if isinstance(name, str)]
    # Otherwise PEFT chooses the targets for the architecture, or they are a regular expression.
    return [ALL_LINEAR] if setting == "targetModules" else []
