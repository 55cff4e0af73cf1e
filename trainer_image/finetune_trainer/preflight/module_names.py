"""Checks that the names in an adapter's settings match something in this model by PEFT's own rules (name_matching.py).

PEFT itself raises an error only if no name matches. It silently ignores a wrong name among right names, and all patterns that
match nothing (peft.tuners.tuners_utils.check_target_module_exists, peft.utils.other.get_pattern_key). adapter_names.py passes the
settings and the model's names to these checks, whose findings propose similar names.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from finetune_job.api.method import ALL_LINEAR, MethodType
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.method_settings import PATTERNS, peft_fields
from finetune_job.plan.method_plan import AdapterPlan, LoraPlan
from finetune_trainer.preflight.name_matching import (
    LAYER,
    is_expression_for,
    is_inside,
    is_saved,
    is_target,
    layer_numbers,
    pattern_matches,
    targets,
)

STACKED_DIMENSIONS, ADAPTABLE_DIMENSIONS = 3, (2, 3)
"""Number of dimensions of stacked experts, and numbers of dimensions of parameters that LoRA adapts (peft's ParamWrapper)."""
Names = Collection[str] | Mapping[str, Any]
"""A list of names, or a mapping whose keys are patterns."""


def wrong_module_names(
    lora: LoraPlan,
    adaptable: Collection[str],
    modules: Collection[str],
    parameters: Collection[str] = (),
    understood: Collection[str] = (),
) -> list[Finding]:
    """Returns the findings about names and patterns in LoRA's settings.

    `adaptable`: names of the modules that can hold an adapter (linear layers, embeddings); `modules`: names of all modules;
    `parameters`: names of all parameters; `understood`: targets that PEFT interprets as something else.
    """
    place = "spec.method.lora"
    reason = "names no linear layer or embedding of this model"
    nothing = f"{reason}, so it would exclude nothing"
    findings = [
        *_without_match(
            "target-module-unknown",
            f"{place}.targetModules",
            lora.target_modules,
            adaptable,
            matches=lambda name, modules: name in understood or is_target(name, modules),
            reason=reason,
            depending=_layer_settings(place, lora.layers_to_transform),
        ),
        *_without_match(
            "target-module-unknown", f"{place}.excludeModules", lora.exclude_modules, adaptable, matches=is_target, reason=nothing
        ),
        *_left_out(lora, adaptable),
    ]
    numbers = {int(match.group(1)) for module in adaptable if (match := LAYER.match(module))}
    findings += _no_such_layers(lora.layers_to_transform or (), numbers, place)
    findings += _in_other_layers(lora.target_modules, lora.layers_to_transform or (), modules, (), place)
    reason = "names no module of this model"
    findings += _without_match(
        "saved-module-unknown", f"{place}.modulesToSave", lora.modules_to_save, modules, matches=is_saved, reason=reason
    )
    reason = "matches no linear layer or embedding of this model, so it would change nothing"
    matched = [*adaptable, *(name for name in parameters if any(targets(target, name) for target in lora.target_parameters))]
    for field, patterns in (("rankPattern", lora.rank_pattern), ("alphaPattern", lora.alpha_pattern)):
        findings += _without_match(
            "adapter-pattern-unmatched", f"{place}.{field}", patterns, matched, matches=pattern_matches, reason=reason
        )
        findings += _overlapping(f"{place}.{field}", patterns, matched)
    return findings


def wrong_parameters(lora: LoraPlan, parameters: Mapping[str, int]) -> list[Finding]:
    """Returns a finding for each name of targetParameters without a match.

    `parameters`: name of each parameter of the base -> its number of dimensions.
    """
    field = "spec.method.lora.targetParameters"
    wrong: dict[str, tuple[str, str]] = {}
    """Name -> message and fix."""
    instead: dict[str, str | None] = {}
    for name in lora.target_parameters:
        named = {parameter: dimensions for parameter, dimensions in parameters.items() if targets(name, parameter)}
        if not named:
            stacked = [parameter for parameter, dimensions in parameters.items() if dimensions == STACKED_DIMENSIONS]
            near = difflib.get_close_matches(name, _endings(stacked or parameters, 3), n=3, cutoff=0.4)
            known = f"did you mean {' or '.join(near)}?" if near else "remove it, or use one of the model's names."
            known_parameters = (
                ", ".join(_endings(stacked, 3)[:8]) or "no stacked parameters: name its linear layers in targetModules"
            )
            wrong[name] = ("names no parameter of this model", f"{known} It has {known_parameters}")
            # Without stacked parameters, no name in this field can replace the wrong one: linear layers belong in targetModules.
            instead[name] = near[0] if near and stacked else None
        elif flat := next((parameter for parameter, dimensions in named.items() if dimensions not in ADAPTABLE_DIMENSIONS), None):
            message = f"names {flat}, which has {named[flat]} dimension; LoRA adapts parameters of two or three"
            wrong[name] = (message, "remove it, or name it in modulesToSave")
            instead[name] = None
    changes = {field: _put_right(lora.target_parameters, instead)}
    return [
        _of_name("target-parameter-unknown", field, name, *message_and_fix, changes=changes)
        for name, message_and_fix in wrong.items()
    ]


def wrong_token_indices(lora: LoraPlan, vocabulary_size: int) -> list[Finding]:
    """Reports rows of the embedding that do not exist."""
    beyond = sorted(index for index in lora.trainable_token_indices if index >= vocabulary_size)
    if not beyond:
        return []
    field = "spec.method.lora.trainableTokenIndices"
    message = f"is beyond the model's embedding, which has {vocabulary_size} rows ({len(beyond)} such ids)"
    within = [index for index in lora.trainable_token_indices if index < vocabulary_size]
    fix = f"write ids from 0 to {vocabulary_size - 1}"
    changes = {field: within or None}
    return [_of_name("token-index-unknown", field, str(beyond[0]), message, fix, changes=changes)]


def _left_out(lora: LoraPlan, adaptable: Collection[str]) -> list[Finding]:
    """Reports targets that match only modules that are excluded or trained whole: PEFT silently gives these no adapter."""
    field = "spec.method.lora.targetModules"
    findings = []
    for name in lora.target_modules:
        named = [module for module in adaptable if name != ALL_LINEAR and targets(name, module)]
        if named and all(any(targets(excluded, module) for excluded in lora.exclude_modules) for module in named):
            reason = "is excluded by excludeModules everywhere, so it gets no adapter"
            fix = "remove it from targetModules or from excludeModules"
            findings.append(_of_name("target-module-excluded", field, name, reason, fix))
        if named and all(any(is_inside(saved, module) for saved in lora.modules_to_save) for module in named):
            reason = "is saved whole by modulesToSave, so PEFT gives it no adapter"
            fix = "remove it from targetModules, because it is trained anyway, or from modulesToSave"
            findings.append(_of_name("target-module-saved-whole", field, name, reason, fix))
    return findings


def _overlapping(field: str, patterns: Mapping[str, int], adaptable: Collection[str]) -> list[Finding]:
    """Reports a module that is matched by patterns with different values: PEFT uses the alphabetically first pattern."""
    for module in adaptable:
        matching = [pattern for pattern in patterns if pattern_matches(pattern, [module])]
        if len({patterns[pattern] for pattern in matching}) > 1:
            shown = " and ".join(f"{pattern}: {patterns[pattern]}" for pattern in matching)
            message = f"{shown} all match {module}; PEFT takes the first of them in alphabetical order, which is {matching[0]}"
            return [_of_name("adapter-patterns-overlap", field, matching[1], message, "let one pattern match each module")]
    return []


def _endings(names: Collection[str], parts: int) -> list[str]:
    """Returns the last `parts` parts of each name, without duplicates."""
    return list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names))


def _no_such_layers(
    written: Collection[int], numbers: Collection[int], place: str, patterns: Collection[Any] = ()
) -> list[Finding]:
    last = max(numbers, default=0)
    field = f"{place}.layersToTransform"
    left = [number for number in written if number in numbers]
    # layersPattern says which layers are counted. It is refused without layers, so it is removed if no layer is left.
    changes = {field: left or None} | ({f"{place}.layersPattern": None} if patterns and not left else {})
    return [
        make_finding(
            "layer-number-unknown",
            field=field,
            value=str(number),
            message=f"the model has no layer {number}; PEFT would silently leave it out",
            fix=f"write numbers from 0 to {last}",
            changes=changes,
        )
        for number in written
        if number not in numbers
    ]


def _in_other_layers(
    names: Iterable[str], layers: Collection[int], modules: Collection[str], patterns: Collection[Any], place: str
) -> list[Finding]:
    """Reports full names of modules in layers that are not chosen: PEFT applies the choice only to partial names."""
    field = f"{place}.layersToTransform"
    beyond = {name: layer_numbers(patterns, [name]) - set(layers) for name in names if layers and name in modules}
    beyond = {name: numbers for name, numbers in beyond.items() if numbers}
    if not beyond:
        return []
    first = next(iter(beyond))
    message = f"{first} in targetModules is the full name of a module, which PEFT adapts whatever layers are chosen"
    return [
        make_finding(
            "full-name-beside-layers",
            field=field,
            value=str(list(layers)),
            message=message,
            fix=f"add {', '.join(map(str, sorted(beyond[first])))} to {field}, or write the end of the name alone, as in "
            f"{first.rpartition('.')[2]}",
            changes={field: sorted({*layers, *(number for numbers in beyond.values() for number in numbers)})},
        )
    ]


def wrong_method_settings(method: MethodType, adapter: AdapterPlan, modules: Collection[str]) -> list[Finding]:
    """Reports settings that PEFT's configuration of this method does not accept, and names that match no module."""
    values, wrong = peft_fields(method, adapter.settings)
    findings = [
        make_finding(
            "method-setting-invalid",
            field=f"spec.method.settings.{problem.name}",
            value=str(problem.value),
            message=problem.reason,
            fix=problem.fix,
        )
        for problem in wrong
    ]
    place = "spec.method.settings"
    reason = "names no module of this model"
    for setting in ("targetModules", "excludeModules", "feedforwardModules"):
        names = _names(adapter, setting)
        chosen = _layer_settings(place, adapter.settings.get("layersToTransform"), adapter.settings.get("layersPattern"))
        findings += _without_match(
            "target-module-unknown",
            f"{place}.{setting}",
            names,
            modules,
            matches=is_target,
            reason=reason,
            depending=chosen if setting == "targetModules" else (),
        )
        text = adapter.settings.get(setting)
        if text and isinstance(text, str) and not is_expression_for(text, modules):
            findings.append(
                make_finding(
                    "target-module-unknown",
                    field=f"{place}.{setting}",
                    value=text,
                    message=f'"{text}" is a string, not a list, and so a regular expression. It matches no module\'s '
                    "whole name, so it would choose nothing",
                    fix=r"write names in a list, as in [q_proj, v_proj], or an expression on whole names, as in .*\.q_proj",
                    changes={f"{place}.{setting}": [text] if is_target(text, modules) else None},
                )
            )
    names = _names(adapter, "modulesToSave")
    findings += _without_match("saved-module-unknown", f"{place}.modulesToSave", names, modules, matches=is_saved, reason=reason)
    written = values.get("layers_to_transform")
    layers = written if isinstance(written, list) else [] if written is None else [written]
    patterns = adapter.settings.get("layersPattern") or []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    numbers = layer_numbers(patterns, modules)
    if layers and not numbers:
        findings.append(
            make_finding(
                "adapter-pattern-unmatched",
                field=f"{place}.layersPattern",
                value=str(patterns),
                message=f"{patterns!r} names no part of this model that has numbered layers, so no layer would be found",
                fix="remove it: layers are then counted wherever the model numbers its modules",
                changes={f"{place}.layersPattern": None},
            )
        )
    else:
        findings += _no_such_layers(layers, numbers, place, patterns)
        findings += _in_other_layers(_names(adapter, "targetModules"), layers, modules, patterns, place)
    reason = "matches no module, so it would change nothing"
    for setting in PATTERNS:
        patterns = adapter.settings.get(setting) or {}
        field = f"{place}.{setting}"
        findings += _without_match("adapter-pattern-unmatched", field, patterns, modules, matches=pattern_matches, reason=reason)
        findings += _overlapping(f"{place}.{setting}", patterns, modules)
    return findings


def _names(adapter: AdapterPlan, setting: str) -> list[str]:
    """Returns the names in a setting; empty if it is unset or a regular expression."""
    written = adapter.settings.get(setting)
    return [name for name in written if isinstance(name, str)] if isinstance(written, list) else []


def _of_name(rule: str, field: str, value: str, message: str, fix: str, *, changes: Mapping[str, Any] | None = None) -> Finding:
    """Makes a finding whose message begins with the name that it is about."""
    return make_finding(rule, field=field, value=value, message=f"{value!r} {message}", fix=fix, changes=changes)


def _layer_settings(place: str, layers: Any, patterns: Any = None) -> list[str]:
    """Returns the fields that are set to choose layers. The rule book allows them only with explicit targets."""
    written = {f"{place}.layersToTransform": layers, f"{place}.layersPattern": patterns}
    return [field for field, value in written.items() if value not in (None, [], (), "")]


def _without_match(
    rule: str,
    field: str,
    names: Names,
    modules: Collection[str],
    *,
    matches: Callable[[str, Iterable[str]], bool],
    reason: str,
    depending: Collection[str] = (),
) -> list[Finding]:
    """Returns a finding for each name that matches nothing. The changes replace it with the most similar name, or remove it.

    `depending`: fields that are also removed if no name is left.
    """
    wrong = [name for name in names if not matches(name, modules)]
    if not wrong:
        return []
    endings = sorted({module.rsplit(".", 1)[-1] for module in modules if not module.rsplit(".", 1)[-1].isdigit()} - {""})
    near = {name: difflib.get_close_matches(name, endings, n=3, cutoff=0.6) for name in wrong}
    right = _put_right(names, {name: similar[0] if similar else None for name, similar in near.items()})
    changes = {field: right} | (dict.fromkeys(depending) if right is None else {})
    return [
        make_finding(
            rule,
            field=field,
            value=name,
            message=f"{name!r} {reason}",
            fix=(f"did you mean {' or '.join(near[name])}?" if near[name] else "remove it, or use one of the model's names")
            + f" The model has {', '.join(endings[:24])}",
            changes=changes,
        )
        for name in wrong
    ]


def _put_right(names: Names, instead: Mapping[str, str | None]) -> list[str] | dict[str, Any] | None:
    """Returns the names with those in `instead` replaced, or removed if their value is None; None if nothing is left."""
    new = {name: instead.get(name, name) for name in names}
    if isinstance(names, Mapping):
        moved = {str(right): names[name] for name, right in new.items() if right is not None and right not in names}
        return {name: value for name, value in names.items() if name not in instead} | moved or None
    return list(dict.fromkeys(right for right in new.values() if right is not None)) or None
