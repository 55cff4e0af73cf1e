"""Which modules get adapters: the names in adapter settings, read in one way for every method, and the rules on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune_job.api.method import ALL_LINEAR, LoraSpec
from finetune_job.methods import METHODS, Family
from finetune_job.rules.rule import Problem, Reproduction, RuleContext, rule

LORA = "method.lora"
SETTINGS = "method.settings"
LISTS = ("targetModules", "excludeModules", "modulesToSave", "feedforwardModules")
"""Lists of names of modules. Methods other than LoRA also take a text, which is a regular expression on whole names."""
_TARGETS = f"{LORA}.targetModules"
_LAYERS = f"{LORA}.layersToTransform"
_SAVED = f"{LORA}.modulesToSave"


@dataclass(frozen=True)
class ManifestSettings:
    """Names that adapter settings of any method hold, as they are written."""

    place: str
    """Path of the settings: method.lora or method.settings."""
    values: Mapping[str, Any]

    def names(self, setting: str) -> list[str]:
        """A list of names; empty where it is unset, or a regular expression."""
        found = self.values.get(setting)
        return [each for each in found if isinstance(each, str)] if isinstance(found, list | tuple) else []

    def path(self, setting: str) -> str:
        """Path of a setting under `spec`."""
        return f"{self.place}.{setting}"

    def field(self, setting: str) -> str:
        """Field that a finding names: method.settings as a whole, because the schema knows no more of it."""
        return self.path(setting) if self.place == LORA else SETTINGS


def manifest_settings(context: RuleContext) -> ManifestSettings:
    """Those of the method that the manifest names."""
    method = context.spec.method
    if METHODS[method.type].family is Family.OTHER:
        return ManifestSettings(SETTINGS, method.settings or {})
    return ManifestSettings(LORA, (method.lora or LoraSpec()).model_dump(mode="json", by_alias=True))


@rule(
    "all-linear-beside-names",
    "all-linear means something only alone",
    reads=(_TARGETS, SETTINGS),
    sources=("peft: peft/tuners/tuners_utils.py, _maybe_include_all_linear_layers (only the plain string is expanded)",),
    reproduction=Reproduction(
        "tests/pitfalls/test_adapters.py::test_all_linear_beside_names_is_a_name",
        "no error: the word matches no module and the names alone are adapted",
    ),
    holds_for="peft >= 0.8",
)
def all_linear_beside_names(context: RuleContext) -> Problem | None:
    written = manifest_settings(context)
    targets = written.names("targetModules")
    if ALL_LINEAR not in targets or len(targets) == 1:
        return None
    return Problem(
        field=written.field("targetModules"),
        value=targets,
        message=f"{ALL_LINEAR} with other names is taken for a module's name, which no model has; only the others are adapted",
        fix=f"write [{ALL_LINEAR}], or the names alone",
        changes={written.path("targetModules"): [ALL_LINEAR]},
    )


@rule(
    "target-modules-empty",
    "An adapter is on something",
    reads=(_TARGETS, f"{LORA}.targetParameters"),
    sources=("peft: peft/tuners/tuners_utils.py, BaseTuner.inject_adapter",),
    reproduction=Reproduction(
        "tests/pitfalls/test_adapters.py::test_no_module_is_named",
        "ValueError: No `target_modules` passed but also no `target_parameters` found",
    ),
    holds_for="peft >= 0.17",
)
def target_modules_empty(context: RuleContext) -> Problem | None:
    lora = context.spec.method.lora
    if lora is None or lora.target_modules != [] or lora.target_parameters:
        return None
    return Problem(
        field=_TARGETS,
        value=[],
        message="an empty list names nothing to adapt; PEFT takes it together with targetParameters, and there are none",
        fix=f"name modules, as in [q_proj, v_proj], or remove {_TARGETS} to adapt every linear layer",
        changes={_TARGETS: None},
    )


@rule(
    "module-name-malformed",
    "Module names are compared as they are written",
    reads=(_TARGETS, f"{LORA}.excludeModules", _SAVED, SETTINGS),
    sources=("peft: peft/tuners/tuners_utils.py, check_target_module_exists",),
    reproduction=Reproduction(
        "tests/pitfalls/test_adapters.py::test_malformed_names_match_nothing", "no error: the name matches no module"
    ),
    holds_for="every version of peft",
)
def module_name_malformed(context: RuleContext) -> Problem | None:
    written = manifest_settings(context)
    for setting in LISTS:
        names = written.names(setting)
        wrong = [name for name in names if not name.strip() or re.search(r"[\s,]", name)]
        if wrong:
            return Problem(
                field=written.field(setting),
                value=names,
                message=f'"{wrong[0]}" is not a module name: it matches nothing, and PEFT says so only if no other name matches',
                fix="write one module name per item, as in [q_proj, v_proj]",
                changes=_well_formed(written),
            )
    return None


def _well_formed(written: ManifestSettings) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for setting in LISTS:
        names = written.names(setting)
        parts = [part for name in names for part in re.split(r"[\s,]+", name) if part]
        if parts != names:
            changes[written.path(setting)] = list(dict.fromkeys(parts)) or None
    return changes


@rule(
    "module-adapted-and-saved",
    "A module that is trained whole gets no adapter",
    reads=(_TARGETS, _SAVED, SETTINGS),
    sources=("peft: peft/tuners/tuners_utils.py, inject_adapter (modules_to_save wins without a word)",),
    reproduction=Reproduction(
        "tests/pitfalls/test_adapters.py::test_a_module_that_is_saved_whole_gets_no_adapter",
        "no error: the module is trained whole and gets no adapter",
    ),
    holds_for="peft <= 0.21",
)
def module_adapted_and_saved(context: RuleContext) -> Problem | None:
    written = manifest_settings(context)
    targets, saved = written.names("targetModules"), written.names("modulesToSave")
    both = [name for name in targets if name in saved]
    if not both:
        return None
    rest = [name for name in targets if name not in both]
    left = [name for name in saved if name not in both]
    return Problem(
        field=written.field("targetModules"),
        value=targets,
        message=f"{', '.join(both)} is to be adapted and trained whole at once: PEFT drops the adapter without a word",
        fix=f"name each module in one of {written.path('targetModules')} and {written.path('modulesToSave')}",
        changes={written.path("targetModules"): rest} if rest else {written.path("modulesToSave"): left or None},
    )


@rule(
    "module-adapted-and-excluded",
    "A module that is excluded gets no adapter",
    reads=(_TARGETS, f"{LORA}.excludeModules", SETTINGS),
    sources=("peft: peft/tuners/tuners_utils.py, check_target_module_exists (exclude_modules comes first)",),
    reproduction=Reproduction(
        "tests/pitfalls/test_adapters.py::test_a_module_that_is_excluded_gets_no_adapter",
        "no error where another module is left: the excluded one gets no adapter",
    ),
    holds_for="peft >= 0.14",
)
def module_adapted_and_excluded(context: RuleContext) -> Problem | None:
    written = manifest_settings(context)
    targets, excluded = written.names("targetModules"), written.names("excludeModules")
    both = [name for name in targets if name in excluded]
    if not both:
        return None
    left = [name for name in excluded if name not in both]
    return Problem(
        field=written.field("targetModules"),
        value=targets,
        message=f"{', '.join(both)} is named by targetModules and by excludeModules: PEFT excludes it without a word",
        fix=f"name each module in one of {written.path('targetModules')} and {written.path('excludeModules')}",
        changes={written.path("excludeModules"): left or None},
    )


@rule(
    "layers-without-targets",
    "Layers can be chosen only among named modules",
    reads=(_LAYERS, _TARGETS, SETTINGS),
    sources=("peft: __post_init__ of the configuration classes; peft/tuners/tuners_utils.py, check_target_module_exists",),
    reproduction=Reproduction(
        "tests/pitfalls/test_adapters.py::test_layers_are_chosen_among_named_modules",
        "ValueError: `layers_to_transform` cannot be used when `target_modules` is a str; of some methods no error, and all "
        "layers are adapted",
    ),
    holds_for="every version of peft",
)
def layers_without_targets(context: RuleContext) -> Problem | None:
    written = manifest_settings(context)
    layers, targets = written.values.get("layersToTransform"), written.values.get("targetModules")
    if layers in (None, []) or written.values.get("targetParameters") or (isinstance(targets, list) and targets != [ALL_LINEAR]):
        return None
    if targets is None and not METHODS[context.spec.method.type].targets_all_linear:
        return None
    named = f"{ALL_LINEAR}, the default of targetModules," if targets in (None, [ALL_LINEAR]) else f'"{targets}"'
    return Problem(
        field=written.field("layersToTransform"),
        value=layers,
        message=f"{named} means modules of all layers; PEFT refuses both together, or adapts all layers without a word",
        fix=f"name the modules in {written.path('targetModules')}, as in [q_proj, v_proj], or remove layersToTransform",
        changes={written.path("layersToTransform"): None, **_without_pattern(written)},
    )


def _without_pattern(written: ManifestSettings) -> dict[str, Any]:
    """LayersPattern means nothing without the layers."""
    return {written.path("layersPattern"): None} if written.values.get("layersPattern") else {}


RULES = (
    all_linear_beside_names,
    target_modules_empty,
    module_name_malformed,
    module_adapted_and_saved,
    module_adapted_and_excluded,
    layers_without_targets,
)
