"""Checks that the model uses the modules that are adapted, trained, packed or made units in the way that this requires.

inspection/module_use.py observes what the model does with each module. model_checks.py calls this with the model as it is
trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

_PEFT_FIELD = "spec.parallelism.fsdp.peftWrapPolicy"
_PARTS_OF_PEFT = frozenset({"base_layer", "original_module", "modules_to_save", "token_adapter", ADAPTER})
_SHOWN, _LISTED = 4, 8
_MOST_NAMES = 256
"""The most names in a list of the manifest (finetune_job.api.method)."""
_OBSERVED = "(observed on a small model of this architecture)"
_LINEAR = (nn.Linear, Conv1D)
Used = Mapping[str, ModuleUse]
"""The uses of modules by their name in the base model, of those that were observed."""


def check_used(seen: ModelInspection) -> list[Finding]:
    """Returns a finding for each kind of mistake about what is trained and what is packed."""
    model, method, uses = seen.trained.model, seen.plan.method, seen.uses
    adapted, saved, plain = _trained(model, uses)
    bypassed = [name for name, use in adapted.items() if use.is_bypassed]
    idle = [name for name, use in adapted.items() if not use.is_bypassed and _is_idle(use)]
    linear = _linear(model, uses)
    several = [name for name, use in adapted.items() if name in linear and _adds_nowhere(use)]
    wrong = [*bypassed, *idle, *several]
    fix = _fix(method, wrong, adapted, _working(model, uses)) if wrong else _Fix("")
    findings = []
    if bypassed:
        message = f"{_shown(bypassed)}: {_why_bypassed(adapted[bypassed[0]])}"
        ends = endings(bypassed, adapted)
        findings.append(_of_modules("adapter-bypassed", f"{_place(method)}.targetModules", ends, message, fix))
    if idle:
        message = f"{_shown(idle)}: {_why_idle(adapted[idle[0]])}, so adapters there would learn nothing"
        ends = endings(idle, adapted)
        findings.append(_of_modules("trained-without-gradient", f"{_place(method)}.targetModules", ends, message, fix))
    if several:
        message = f"{_shown(several)}: what they give is not a single tensor, to which PEFT could add an adapter's {_OBSERVED}"
        ends = endings(several, adapted)
        findings.append(_of_modules("target-gives-no-tensor", f"{_place(method)}.targetModules", ends, message, fix))
    if still := [name for name, use in saved.items() if not use.is_bypassed and _is_idle(use)]:
        message = f"{_shown(still)}: {_why_idle(saved[still[0]])}, so the copy that is trained would never change"
        field, ends = f"{_place(method)}.modulesToSave", endings(still, saved)
        fix = _Fix(f"remove {_listed(ends)} from the list", _without_saved(method, field, still, saved))
        findings.append(_of_modules("trained-without-gradient", field, ends, message, fix))
    if without := [name for name, use in plain.items() if not use.gets_gradient]:
        findings.append(_about_whole(method, without, plain))
    if method.quantization is not None:
        findings += _packed(seen.plan, model, uses)
    return findings


def check_units_used(seen: ModelInspection) -> list[Finding]:
    """FSDP gathers the weights of a unit while its module is called; code that reads them at another time reads a shard."""
    plan = seen.plan
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
        # Each weight of the base is then a unit, whatever the other policy is.
        field, fix, changes = _PEFT_FIELD, f"set {_PEFT_FIELD}: false", {_PEFT_FIELD: False}
    return [
        make_finding(
            "unit-bypassed",
            field=field,
            value=first,
            message=f"{len(wrong)} modules that would be FSDP units are not called, first {first}: {use.readers[0]} reads their "
            "weights itself, and would find shards there",
            fix=f"{fix}, so that whole layers are the units",
            changes=changes,
        )
    ]


def bypassed_linear(model: nn.Module, uses: ModuleUses) -> list[str]:
    """Returns the ends of names of the linear layers on which no adapter works."""
    linear = _linear(model, uses)
    return endings([name for name, use in linear.items() if _is_unfit(use)], linear)


def base_name(name: str) -> str:
    """Returns a module's name without what PEFT puts around it."""
    parts = name.removeprefix(INSIDE_PEFT).split(".") if name.startswith(INSIDE_PEFT) else name.split(".")
    return ".".join(part for part in parts if part not in _PARTS_OF_PEFT)


def endings(wanted: Collection[str], among: Collection[str]) -> list[str]:
    """Returns the shortest ends of names that match these modules and no others of `among`, as PEFT matches them."""
    found: list[str] = []
    meant = set(wanted)
    for name in wanted:
        if any(_matches(end, name) for end in found):
            continue
        parts = name.split(".")
        candidates = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        found.append(next((end for end in candidates if all(each in meant for each in among if _matches(end, each))), name))
    return found


def _trained(model: nn.Module, uses: ModuleUses) -> tuple[Used, Used, Used]:
    """Returns the modules with an adapter, those with a trained copy, and those with trained parameters of their own."""
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
        elif isinstance(module, BaseTunerLayer) and not any(name.startswith(each) for each in inside[:-1]):
            adapted[base_name(name)] = use
        elif any(parameter.requires_grad for parameter in module.parameters(recurse=False)) and not (
            is_peft or any(name.startswith(each) and ".base_layer" not in name for each in inside)
        ):
            plain[base_name(name)] = use
    return adapted, saved, plain


def _linear(model: nn.Module, uses: ModuleUses) -> dict[str, ModuleUse]:
    """Returns the model's own linear layers, with or without adapters."""
    found: dict[str, ModuleUse] = {}
    for name, module in model.named_modules():
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if isinstance(base, _LINEAR) and (use := uses.of(base_name(name))) is not None:
            found[base_name(name)] = use
    return found


def _working(model: nn.Module, uses: ModuleUses) -> list[str]:
    """Returns the ends of names of linear layers that PEFT accepts and on which adapters work.

    The output layer is left out, as all-linear leaves it out.
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
    """Whether PEFT accepts the name; it refuses some in some architectures."""
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
            f"where its package is installed, as it is here, transformers hands their weights to {use.is_handed_to[0]}, past any "
            "adapter: the kernel computes on a GPU without it"
        )
    if not use.is_called:
        return (
            f"{use.readers[0]} never calls them and reads their weights itself, so their adapters get no gradient and have no "
            f"effect {_OBSERVED}"
        )
    return (
        f"{use.readers[0]} reads their weights itself besides calling them, so that an adapter acts in one place and a merged "
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


@dataclass(frozen=True)
class _Fix:
    text: str
    changes: Mapping[str, Any] | None = None


def _fix(method: MethodPlan, wrong: Sequence[str], adapted: Collection[str], good: Sequence[str]) -> _Fix:
    """Returns a fix that leaves these modules out and keeps all others."""
    place, ends = _place(method), endings(wrong, adapted)
    targets = _names(method, "targetModules")
    kept = [name for name in targets if name == ALL_LINEAR or any(_matches(name, each) for each in set(adapted) - set(wrong))]
    rest = [end for end in ends if not any(_matches(name, end) for name in targets if name not in kept)]
    changes: dict[str, list[str]] = {}
    can_exclude = method.lora is not None or "excludeModules" in known_settings(method.type)
    if set(adapted) <= set(wrong) or (rest and not can_exclude):
        # A module that is excluded or trained whole is no target.
        others = [*_names(method, "excludeModules"), *_names(method, "modulesToSave")]
        changes[f"{place}.targetModules"] = [name for name in good if not any(_matches(each, name) for each in others)]
    else:
        if kept != targets:
            changes[f"{place}.targetModules"] = kept
        if rest:
            changes[f"{place}.excludeModules"] = [*_names(method, "excludeModules"), *rest]
    if not all(changes.values()):
        return _Fix(f"name in {place}.targetModules modules that take an adapter, which excludeModules and modulesToSave leave")
    if any(len(names) > _MOST_NAMES for names in changes.values()):
        return _Fix("use a checkpoint of the language model alone, or name in targetModules what only its layers have")
    return _Fix(" and ".join(f"set {field}: [{_listed(names)}]" for field, names in changes.items()), changes)


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:_LISTED], *(["..."] if len(names) > _LISTED else [])])


def _about_whole(method: MethodPlan, without: Sequence[str], plain: Collection[str]) -> Finding:
    message = f"parameters of {_shown(without)} are trained, and no pass over text gives them a gradient: they would never change"
    if method.type is MethodType.FULL:
        fix = "use method.type: LoRA with targetModules that text uses, or a checkpoint of the language model alone"
        return _of_modules("trained-without-gradient", "spec.method.type", [method.type.value], message, _Fix(fix))
    field = f"{_place(method)}.bias"
    changed = _Fix(f"set {field}: none", {field: "none"})
    return _of_modules("trained-without-gradient", field, endings(without, plain), message, changed)


def _without_saved(method: MethodPlan, field: str, still: Collection[str], saved: Collection[str]) -> dict[str, Any] | None:
    """Returns the list without the modules that never change; None if one of its names also means a module that does change."""
    names = _names(method, "modulesToSave")
    # PEFT matches these by the end of the name, even if that is not a whole part of it.
    meant = {name: [module for module in saved if module.endswith(name)] for name in names}
    wrong = [name for name in names if not set(still).isdisjoint(meant[name])]
    if any(not set(still).issuperset(meant[name]) for name in wrong):
        return None
    return {field: [name for name in names if name not in wrong] or None}


def _packed(plan: RunPlan, model: nn.Module, uses: ModuleUses) -> Iterator[Finding]:
    """A packed weight is one column of bytes; only the layer itself can compute with it."""
    packed = [name for name, module in model.named_modules() if hasattr(module, "weight") and is_packed(module)]
    wrong = {base_name(name): use for name in packed if (use := uses.of(base_name(name))) is not None and use.is_bypassed}
    if wrong:
        use = next(iter(wrong.values()))
        reader = use.readers[0] if use.readers else f"{use.is_handed_to[0]}, to which transformers hands it here,"
        message = (
            f"{_shown(list(wrong))}: {reader} reads the weight itself as a matrix, and packed to 4 bits it has not that shape "
            f"{_OBSERVED}"
        )
        kind = lora_kind(packs_base=False, magnitudes=METHODS[plan.method.type].needs.magnitudes).value
        changes = {"spec.method.type": kind, "spec.method.quantization": None}
        if plan.merge.base is not MergeBase.ORIGINAL:
            # Without packed weights only the original base can be merged into.
            changes["spec.merge.base"] = None
        fix = _Fix(f"set spec.method.type: {kind}", changes)
        yield _of_modules("packed-weight-read", "spec.method.type", [plan.method.type.value], message, fix)


def _names(method: MethodPlan, setting: str) -> list[str]:
    if method.lora is not None:
        names: tuple[str, ...] = getattr(method.lora, to_snake(setting))
        return list(names)
    written: Any = method.adapter.settings.get(setting) if method.adapter is not None else None
    if isinstance(written, list):
        return [name for name in written if isinstance(name, str)]
    # The targets are PEFT's own choice for the architecture, or a regular expression.
    return [ALL_LINEAR] if setting == "targetModules" else []


def _matches(end: str, name: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _of_modules(rule: str, field: str, values: Sequence[str], message: str, fix: _Fix) -> Finding:
    return make_finding(rule, field=field, value=_listed(values), message=message, fix=fix.text, changes=fix.changes)
