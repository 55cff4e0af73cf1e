"""PURE. Do the names in the adapter settings mean anything in this model? By PEFT's own matching rules, with near matches.

PEFT itself raises only where nothing at all matches: one wrong name among right ones is dropped without a word, and patterns that
match nothing always are (peft.tuners.tuners_utils.check_target_module_exists, peft.utils.other.get_pattern_key).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from finetune_job.api.method import ALL_LINEAR
from finetune_job.plan.run_plan import LoraPlan
from finetune_job.rules.rule import Finding


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
