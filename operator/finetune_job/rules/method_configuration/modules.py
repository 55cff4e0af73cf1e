"""Rules on module names in adapter settings, which every method interprets in the same way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune_job.api.method import ALL_LINEAR, LoraSpec
from finetune_job.methods import METHODS, Family
from finetune_job.rules.rule import Problem, RuleContext, rule

LORA = "method.lora"
SETTINGS = "method.settings"
LISTS = ("targetModules", "excludeModules", "modulesToSave", "feedforwardModules")
"""Settings with lists of module names. Methods outside LoRA's family also accept a string: a regular expression on full names."""


@dataclass(frozen=True)
class ManifestSettings:
    """The adapter settings of any method, as written in the manifest."""

    place: str
    """Path of the settings: `method.lora` or `method.settings`."""
    values: Mapping[str, Any]

    def names(self, setting: str) -> list[str]:
        """Return the names in a setting; empty if it is unset or a regular expression."""
        names = self.values.get(setting)
        return [name for name in names if isinstance(name, str)] if isinstance(names, list | tuple) else []

    def path(self, setting: str) -> str:
        """Return the path of a setting under `spec`."""
        return f"{self.place}.{setting}"

    def field(self, setting: str) -> str:
        """Return the field to report: `method.settings` as a whole, because the schema does not know the settings within it."""
        return self.path(setting) if self.place == LORA else SETTINGS


def manifest_settings(context: RuleContext) -> ManifestSettings:
    """Return the settings of the method that the manifest names."""
    method = context.spec.method
    if METHODS[method.type].family is Family.OTHER:
        return ManifestSettings(SETTINGS, method.settings or {})
    return ManifestSettings(LORA, (method.lora or LoraSpec()).model_dump(mode="json", by_alias=True))


@rule("all-linear-beside-names")
def all_linear_beside_names(context: RuleContext) -> Problem | None:
    written = manifest_settings(context)
    targets = written.names("targetModules")
    if ALL_LINEAR not in targets or len(targets) == 1:
        return None
    return Problem(value=targets, field=written.field("targetModules"), changes={written.path("targetModules"): [ALL_LINEAR]})


@rule("target-modules-empty")
def target_modules_empty(context: RuleContext) -> Problem | None:
    lora = context.spec.method.lora
    if lora is None or lora.target_modules != [] or lora.target_parameters:
        return None
    return Problem(value=[])


@rule("module-name-malformed")
def module_name_malformed(context: RuleContext) -> Problem | None:
    written = manifest_settings(context)
    for setting in LISTS:
        names = written.names(setting)
        wrong = [name for name in names if not name.strip() or re.search(r"[\s,]", name)]
        if wrong:
            return Problem(
                value=names,
                message=f'"{wrong[0]}" is not a module name: it matches nothing, and PEFT says so only if no other name matches',
                fix="write one module name per item, as in [q_proj, v_proj]",
                field=written.field(setting),
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


@rule("module-adapted-and-saved")
def module_adapted_and_saved(context: RuleContext) -> Problem | None:
    written = manifest_settings(context)
    targets, saved = written.names("targetModules"), written.names("modulesToSave")
    both = [name for name in targets if name in saved]
    if not both:
        return None
    rest = [name for name in targets if name not in both]
    left = [name for name in saved if name not in both]
    return Problem(
        value=targets,
        message=f"{', '.join(both)} is to be adapted and trained whole at once: PEFT silently drops the adapter",
        fix=f"name each module in one of {written.path('targetModules')} and {written.path('modulesToSave')}",
        field=written.field("targetModules"),
        changes={written.path("targetModules"): rest} if rest else {written.path("modulesToSave"): left or None},
    )


@rule("module-adapted-and-excluded")
def module_adapted_and_excluded(context: RuleContext) -> Problem | None:
    written = manifest_settings(context)
    targets, excluded = written.names("targetModules"), written.names("excludeModules")
    both = [name for name in targets if name in excluded]
    if not both:
        return None
    left = [name for name in excluded if name not in both]
    return Problem(
        value=targets,
        message=f"{', '.join(both)} is named by targetModules and by excludeModules: PEFT silently excludes it",
        fix=f"name each module in one of {written.path('targetModules')} and {written.path('excludeModules')}",
        field=written.field("targetModules"),
        changes={written.path("excludeModules"): left or None},
    )


@rule("layers-without-targets")
def layers_without_targets(context: RuleContext) -> Problem | None:
    written = manifest_settings(context)
    layers, targets = written.values.get("layersToTransform"), written.values.get("targetModules")
    if layers in (None, []) or written.values.get("targetParameters") or (isinstance(targets, list) and targets != [ALL_LINEAR]):
        return None
    if targets is None and not METHODS[context.spec.method.type].targets_all_linear:
        return None
    named = f"{ALL_LINEAR}, the default of targetModules," if targets in (None, [ALL_LINEAR]) else f'"{targets}"'
    return Problem(
        value=layers,
        message=f"{named} means modules of all layers; PEFT refuses both together, or silently adapts all layers",
        fix=f"name the modules in {written.path('targetModules')}, as in [q_proj, v_proj], or remove layersToTransform",
        field=written.field("layersToTransform"),
        changes={written.path("layersToTransform"): None, **_without_pattern(written)},
    )


def _without_pattern(written: ManifestSettings) -> dict[str, Any]:
    """Return the change that removes `layersPattern`, which has no effect without `layersToTransform`."""
    return {written.path("layersPattern"): None} if written.values.get("layersPattern") else {}
