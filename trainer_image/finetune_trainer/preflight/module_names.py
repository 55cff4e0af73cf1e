"""PURE. Do the names in the adapter settings mean anything in this model? By PEFT's own matching rules, with near matches.

PEFT itself raises only where nothing at all matches: one wrong name among right ones is dropped without a word, and patterns that
match nothing always are (peft.tuners.tuners_utils.check_target_module_exists, peft.utils.other.get_pattern_key).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping

from finetune_job.api.method import ALL_LINEAR, MethodType
from finetune_job.method_settings import peft_fields
from finetune_job.plan.run_plan import AdapterPlan, LoraPlan
from finetune_job.rules.rule import Finding, Severity

STACKED_DIMENSIONS, ADAPTABLE_DIMENSIONS = 3, (2, 3)
"""Of a parameter that holds one matrix per expert, and of those that LoRA adapts (peft.tuners.lora.layer.ParamWrapper)."""
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
"""How PEFT finds a module's layer number: the first part of its name that is one."""


def check_names(lora: LoraPlan, adaptable: Collection[str], modules: Collection[str]) -> list[Finding]:
    """A finding per name without a match.

    `adaptable`: names of the modules that can hold an adapter (linear layers, embeddings); `modules`: names of all modules.
    """
    findings = []
    for name in lora.target_modules:
        if name != ALL_LINEAR and not any(_targets(name, module) for module in adaptable):
            field = "spec.method.lora.targetModules"
            findings.append(
                _unknown("target-module-unknown", field, name, adaptable, "names no linear layer or embedding of this model")
            )
    for name in lora.exclude_modules:
        if not any(_targets(name, module) for module in adaptable):
            field = "spec.method.lora.excludeModules"
            reason = "names no linear layer or embedding of this model, so it would exclude nothing"
            findings.append(_unknown("target-module-unknown", field, name, adaptable, reason))
    findings += _left_out(lora, adaptable)
    numbers = {int(found.group(1)) for module in adaptable if (found := _LAYER.match(module))}
    findings += [_no_such_layer(number, numbers) for number in lora.layers_to_transform or () if number not in numbers]
    for name in lora.modules_to_save:
        if not any(module.endswith(name) for module in modules):
            field = "spec.method.lora.modulesToSave"
            findings.append(_unknown("saved-module-unknown", field, name, modules, "names no module of this model"))
    for field, patterns in (("rankPattern", lora.rank_pattern), ("alphaPattern", lora.alpha_pattern)):
        reason = "matches no linear layer or embedding of this model, so it would change nothing"
        findings += [
            _unknown("adapter-pattern-unmatched", f"spec.method.lora.{field}", pattern, adaptable, reason)
            for pattern in patterns
            if not _pattern_matches(pattern, adaptable)
        ]
        findings += _overlapping(f"spec.method.lora.{field}", patterns, adaptable)
    return findings


def check_parameters(lora: LoraPlan, parameters: Mapping[str, int]) -> list[Finding]:
    """A finding per name of targetParameters without a match. `parameters`: dimensions by name, of all parameters of the base."""
    field = "spec.method.lora.targetParameters"
    findings = []
    for name in lora.target_parameters:
        found = {parameter: dimensions for parameter, dimensions in parameters.items() if _targets(name, parameter)}
        if not found:
            stacked = [parameter for parameter, dimensions in parameters.items() if dimensions == STACKED_DIMENSIONS]
            near = difflib.get_close_matches(name, _endings(stacked or parameters, 3), n=3, cutoff=0.4)
            known = f"did you mean {' or '.join(near)}?" if near else "remove it, or use one of the model's names."
            held = ", ".join(_endings(stacked, 3)[:8]) or "no stacked parameters: name its linear layers in targetModules"
            findings.append(
                _finding("target-parameter-unknown", field, name, "names no parameter of this model", f"{known} It has {held}")
            )
        elif wrong := next((each for each, dimensions in found.items() if dimensions not in ADAPTABLE_DIMENSIONS), None):
            message = f"names {wrong}, which has {found[wrong]} dimension; LoRA adapts parameters of two or three"
            findings.append(_finding("target-parameter-unknown", field, name, message, "remove it, or name it in modulesToSave"))
    return findings


def check_tokens(lora: LoraPlan, vocabulary_size: int) -> list[Finding]:
    """A finding where rows of the embedding are named that it does not have."""
    beyond = sorted(index for index in lora.trainable_token_indices if index >= vocabulary_size)
    if not beyond:
        return []
    field = "spec.method.lora.trainableTokenIndices"
    message = f"is beyond the model's embedding, which has {vocabulary_size} rows ({len(beyond)} such ids)"
    return [_finding("token-index-unknown", field, str(beyond[0]), message, f"write ids from 0 to {vocabulary_size - 1}")]


def _left_out(lora: LoraPlan, adaptable: Collection[str]) -> list[Finding]:
    """Targets of which nothing is left: PEFT drops what is excluded or saved whole without a word."""
    field = "spec.method.lora.targetModules"
    findings = []
    for name in lora.target_modules:
        named = [module for module in adaptable if name != ALL_LINEAR and _targets(name, module)]
        if named and all(any(_targets(each, module) for each in lora.exclude_modules) for module in named):
            reason = "is excluded by excludeModules everywhere, so it gets no adapter"
            fix = "remove it from targetModules or from excludeModules"
            findings.append(_finding("target-module-excluded", field, name, reason, fix, severity="warning"))
        if named and all(any(_is_inside(each, module) for each in lora.modules_to_save) for module in named):
            reason = "is saved whole by modulesToSave, so PEFT gives it no adapter beside"
            fix = "remove it from targetModules, because it is trained anyway, or from modulesToSave"
            findings.append(_finding("target-module-saved-whole", field, name, reason, fix, severity="warning"))
    return findings


def _is_inside(saved: str, module: str) -> bool:
    """Whether `module` is the module of this name or lies in it."""
    return f".{saved}." in f".{module}."


def _overlapping(field: str, patterns: Mapping[str, int], adaptable: Collection[str]) -> list[Finding]:
    """PEFT takes the first pattern that matches, in an order that adapter_config.json does not promise to keep."""
    for module in adaptable:
        matching = [pattern for pattern in patterns if _pattern_matches(pattern, [module])]
        if len({patterns[pattern] for pattern in matching}) > 1:
            shown = " and ".join(f"{pattern}: {patterns[pattern]}" for pattern in matching)
            message = f"{shown} all match {module}; PEFT takes the first of them"
            return [
                _finding(
                    "adapter-patterns-overlap", field, matching[1], message, "let one pattern match each module", severity="warning"
                )
            ]
    return []


def _endings(names: Collection[str], parts: int) -> list[str]:
    """The last `parts` parts of the names, each once."""
    return list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names))


def _no_such_layer(number: int, numbers: Collection[int], place: str = "spec.method.lora") -> Finding:
    last = max(numbers, default=0)
    return Finding(
        rule="layer-number-unknown",
        severity="error",
        field=f"{place}.layersToTransform",
        value=str(number),
        message=f"the model has no layer {number}; PEFT would leave it out without a word",
        fix=f"write numbers from 0 to {last}",
    )


def check_settings(method: MethodType, adapter: AdapterPlan, modules: Collection[str]) -> list[Finding]:
    """A finding per setting that PEFT's configuration of this method does not take, and per target that names no module."""
    values, wrong = peft_fields(method, adapter.settings)
    findings = [
        Finding(
            rule="method-setting-invalid",
            severity="error",
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
        findings += [
            _unknown("target-module-unknown", f"{place}.{setting}", name, modules, reason)
            for name in _names(adapter, setting)
            if name != ALL_LINEAR and not any(_targets(name, module) for module in modules)
        ]
    findings += [
        _unknown("saved-module-unknown", f"{place}.modulesToSave", name, modules, reason)
        for name in _names(adapter, "modulesToSave")
        if not any(module.endswith(name) for module in modules)
    ]
    numbers = {int(found.group(1)) for module in modules if (found := _LAYER.match(module))}
    layers = values.get("layers_to_transform") or []
    findings += [
        _no_such_layer(number, numbers, place)
        for number in (layers if isinstance(layers, list) else [layers])
        if number not in numbers and not adapter.settings.get("layersPattern")
    ]
    for setting in _PATTERNS:
        patterns = adapter.settings.get(setting) or {}
        findings += [
            _unknown(
                "adapter-pattern-unmatched", f"{place}.{setting}", pattern, modules, "matches no module, so it would change nothing"
            )
            for pattern in patterns
            if not _pattern_matches(pattern, modules)
        ]
        findings += _overlapping(f"{place}.{setting}", patterns, modules)
    return findings


_PATTERNS = ("rankPattern", "alphaPattern", "nFrequencyPattern", "blockSizePattern", "lambdaPattern")


def _names(adapter: AdapterPlan, setting: str) -> list[str]:
    """A list of names; empty where it is unset, or a regular expression."""
    written = adapter.settings.get(setting)
    return [name for name in written if isinstance(name, str)] if isinstance(written, list) else []


def _finding(rule: str, field: str, value: str, message: str, fix: str, *, severity: Severity = "error") -> Finding:
    return Finding(rule=rule, severity=severity, field=field, value=value, message=f"{value!r} {message}", fix=fix)


def _targets(name: str, module: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _pattern_matches(pattern: str, modules: Iterable[str]) -> bool:
    try:
        compiled = re.compile(rf"(.*\.)?({pattern})$")
    except re.error:
        return False
    return any(compiled.match(module) for module in modules)


def _unknown(rule: str, field: str, name: str, modules: Collection[str], reason: str) -> Finding:
    endings = sorted({module.rsplit(".", 1)[-1] for module in modules if not module.rsplit(".", 1)[-1].isdigit()} - {""})
    near = difflib.get_close_matches(name, endings, n=3, cutoff=0.6)
    fix = f"did you mean {' or '.join(near)}?" if near else "remove it, or use one of the model's names"
    return Finding(
        rule=rule,
        severity="error",
        field=field,
        value=name,
        message=f"{name!r} {reason}",
        fix=f"{fix} The model has {', '.join(endings[:24])}",
    )
