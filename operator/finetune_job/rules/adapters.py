"""Adapter settings: targets, patterns, dropout."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from finetune_job.api.method import ALL_LINEAR, LoraSpec
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import Problem, rule
from finetune_job.rules.rule import Reproduction

_LORA = "method.lora"
_DROPOUT = f"{_LORA}.loraDropout"
_TARGETS = f"{_LORA}.targetModules"
_LAYERS = f"{_LORA}.layersToTransform"
_SAVED = f"{_LORA}.modulesToSave"
_RANKS = f"{_LORA}.rankPattern"
_ALPHAS = f"{_LORA}.alphaPattern"


@rule(
    "lora-dropout-range",
    "Dropout must leave something over",
    reads=(_DROPOUT,),
    sources=("torch: nn.Dropout; a probability of 1 zeroes the adapter's input",),
    reproduction=Reproduction("tests/pitfalls/test_adapters.py", "ValueError: dropout probability has to be between 0 and 1"),
    holds_for="every version",
)
def lora_dropout_range(context: RuleContext) -> Problem | None:
    written = _lora(context).lora_dropout
    if written is None or Decimal(written) < 1:
        return None
    return Problem(
        field=_DROPOUT,
        value=written,
        message="dropout is a probability below 1; at 1 the adapter sees zeros and learns nothing, above 1 torch refuses it",
        fix=f'write a number such as "0.05", or remove {_DROPOUT}',
        changes={_DROPOUT: None},
    )


@rule(
    "all-linear-beside-names",
    "all-linear means something only alone",
    reads=(_TARGETS,),
    sources=("peft: peft/tuners/tuners_utils.py, _maybe_include_all_linear_layers (only the plain string is expanded)",),
    reproduction=Reproduction(
        "tests/pitfalls/test_adapters.py", "no error: the word matches no module and the names alone are adapted"
    ),
    holds_for="peft >= 0.8",
)
def all_linear_beside_names(context: RuleContext) -> Problem | None:
    targets = _lora(context).target_modules or []
    if ALL_LINEAR not in targets or len(targets) == 1:
        return None
    return Problem(
        field=_TARGETS,
        value=targets,
        message=f"{ALL_LINEAR} beside other names is taken for a module's name, which no model has; only the others are adapted",
        fix=f"write [{ALL_LINEAR}], or the names alone",
        changes={_TARGETS: [ALL_LINEAR]},
    )


@rule(
    "module-name-malformed",
    "Module names are compared as they stand",
    reads=(_TARGETS, _SAVED),
    sources=("peft: peft/tuners/tuners_utils.py, check_target_module_exists",),
    reproduction=Reproduction("tests/pitfalls/test_adapters.py", "no error: the name matches no module"),
    holds_for="every version of peft",
)
def module_name_malformed(context: RuleContext) -> Problem | None:
    lora = _lora(context)
    for path, names in ((_TARGETS, lora.target_modules or []), (_SAVED, lora.modules_to_save or [])):
        wrong = [name for name in names if not name.strip() or re.search(r"[\s,]", name)]
        if wrong:
            return Problem(
                field=path,
                value=names,
                message=f'"{wrong[0]}" is no module name: it matches nothing, and PEFT says so only if no other name matches',
                fix="write one module name per item, as in [q_proj, v_proj]",
                changes=_well_formed(lora),
            )
    return None


def _well_formed(lora: LoraSpec) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for path, names in ((_TARGETS, lora.target_modules), (_SAVED, lora.modules_to_save)):
        parts = [part for name in names or [] for part in re.split(r"[\s,]+", name) if part]
        if names is not None and parts != names:
            changes[path] = list(dict.fromkeys(parts)) or None
    return changes


@rule(
    "module-adapted-and-saved",
    "A module that is trained whole gets no adapter",
    reads=(_TARGETS, _SAVED),
    sources=("peft: peft/tuners/tuners_utils.py, inject_adapter (modules_to_save wins without a word)",),
    reproduction=Reproduction("tests/pitfalls/test_adapters.py", "no error: the module is trained whole and gets no adapter"),
    holds_for="peft <= 0.21",
)
def module_adapted_and_saved(context: RuleContext) -> Problem | None:
    lora = _lora(context)
    both = [name for name in lora.target_modules or [] if name in (lora.modules_to_save or [])]
    if not both:
        return None
    rest = [name for name in lora.target_modules or [] if name not in both]
    saved = [name for name in lora.modules_to_save or [] if name not in both]
    return Problem(
        field=_TARGETS,
        value=lora.target_modules,
        message=f"{', '.join(both)} is to be adapted and trained whole at once: PEFT drops the adapter without a word",
        fix=f"name each module in one of {_TARGETS} and {_SAVED}",
        changes={_TARGETS: rest} if rest else {_SAVED: saved or None},
    )


@rule(
    "adapter-pattern-malformed",
    "Pattern keys are regular expressions",
    reads=(_RANKS, _ALPHAS),
    sources=("peft: peft/utils/other.py, get_pattern_key",),
    reproduction=Reproduction("tests/pitfalls/test_adapters.py", "no error: the pattern matches no module"),
    holds_for="every version of peft",
)
def adapter_pattern_malformed(context: RuleContext) -> Problem | None:
    lora = _lora(context)
    for path, pattern in ((_RANKS, lora.rank_pattern or {}), (_ALPHAS, lora.alpha_pattern or {})):
        wrong = [key for key in pattern if not _is_pattern(key)]
        if wrong:
            rest = {key: value for key, value in pattern.items() if key not in wrong}
            return Problem(
                field=path,
                value=wrong[0],
                message=f'"{wrong[0]}" is not a regular expression on the end of a module name',
                fix="write a module name such as q_proj, or a regular expression such as layers\\.0\\..*",
                changes={path: rest or None} | _other_pattern(path, lora),
            )
    return None


def _other_pattern(path: str, lora: LoraSpec) -> dict[str, Any]:
    """The other pattern mended too, so that one application of the changes is enough."""
    if path == _ALPHAS or lora.alpha_pattern is None:
        return {}
    rest = {key: value for key, value in lora.alpha_pattern.items() if _is_pattern(key)}
    return {} if rest == lora.alpha_pattern else {_ALPHAS: rest or None}


def _is_pattern(key: str) -> bool:
    try:
        re.compile(rf"(.*\.)?({key})$")
    except re.error:
        return False
    return bool(key.strip())


@rule(
    "rslora-with-alpha",
    "rsLoRA scales by the square root of the rank",
    severity="warning",
    reads=(f"{_LORA}.useRslora", f"{_LORA}.loraAlpha", f"{_LORA}.r"),
    sources=("Kalajdzievski 2023, A rank stabilization scaling factor for fine-tuning with LoRA",),
    holds_for="every version of peft",
)
def rslora_with_alpha(context: RuleContext) -> Problem | None:
    lora = _lora(context)
    if not lora.use_rslora or lora.lora_alpha is None or lora.lora_alpha < lora.r or lora.r < 4:
        return None
    factor = lora.r**0.5
    return Problem(
        field=f"{_LORA}.loraAlpha",
        value=lora.lora_alpha,
        message=f"loraAlpha / sqrt(r) is {lora.lora_alpha / factor:g}: {factor:g} times the scale that plain LoRA would have",
        fix=f"set {_LORA}.loraAlpha to about {round(lora.lora_alpha / factor) or 1} for the scale that plain LoRA has",
        changes={f"{_LORA}.loraAlpha": min(round(lora.lora_alpha / factor) or 1, lora.r - 1)},
    )


@rule(
    "layers-without-targets",
    "Layers can be chosen only among named modules",
    reads=(_LAYERS, _TARGETS),
    sources=("peft: peft/tuners/lora/config.py, LoraConfig.__post_init__ (layers_to_transform needs a list of names)",),
    holds_for="every version of peft",
)
def layers_without_targets(context: RuleContext) -> Problem | None:
    lora = _lora(context)
    if lora.layers_to_transform is None or lora.target_modules not in (None, [ALL_LINEAR]):
        return None
    return Problem(
        field=_LAYERS,
        value=lora.layers_to_transform,
        message=f"{ALL_LINEAR}, which {_TARGETS} is where nothing is named, stands for all layers; PEFT refuses both together",
        fix=f"name the modules in {_TARGETS}, as in [q_proj, v_proj], or remove {_LAYERS}",
        changes={_LAYERS: None},
    )


def _lora(context: RuleContext) -> LoraSpec:
    return context.spec.method.lora or LoraSpec()


RULES = (
    lora_dropout_range,
    all_linear_beside_names,
    module_name_malformed,
    module_adapted_and_saved,
    adapter_pattern_malformed,
    rslora_with_alpha,
    layers_without_targets,
)
