"""PURE. Do the names in the adapter settings mean anything in this model? By PEFT's own matching rules, with near matches.

PEFT itself raises only where nothing at all matches: one wrong name among right ones is dropped without a word, and patterns that
match nothing always are (peft.tuners.tuners_utils.check_target_module_exists, peft.utils.other.get_pattern_key).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from finetune_job.api.method import ALL_LINEAR, MethodType
from finetune_job.plan.run_plan import AdapterPlan, LoraPlan
from finetune_job.rules.rule import Finding
from finetune_trainer.model.method_settings import TARGETS, camel_case, peft_fields


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
    findings += [
        _no_such_layer(number, adaptable)
        for number in lora.layers_to_transform or ()
        if not any(str(number) in module.split(".") for module in adaptable)
    ]
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
    return findings


def _no_such_layer(number: int, adaptable: Collection[str]) -> Finding:
    last = max((int(part) for module in adaptable for part in module.split(".") if part.isdigit()), default=0)
    return Finding(
        rule="layer-number-unknown",
        severity="error",
        field="spec.method.lora.layersToTransform",
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
    targets = values.get(TARGETS) or []
    field = f"spec.method.settings.{camel_case(TARGETS)}"
    return findings + [
        _unknown("target-module-unknown", field, name, modules, "names no module of this model")
        for name in (targets if isinstance(targets, list) else [])
        if name != ALL_LINEAR and not any(_targets(name, module) for module in modules)
    ]


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
