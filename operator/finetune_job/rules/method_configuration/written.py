"""Settings of adapters as a manifest writes them: those of LoRA and those of the other methods, read in one way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune_job.api.method import LoraSpec
from finetune_job.methods import METHODS, Family
from finetune_job.rules.context import RuleContext

LORA = "method.lora"
SETTINGS = "method.settings"
LISTS = ("targetModules", "excludeModules", "modulesToSave", "feedforwardModules")
"""Lists of names of modules. Methods other than LoRA also take a text, which is a regular expression on whole names."""
PATTERNS = ("rankPattern", "alphaPattern", "nFrequencyPattern", "blockSizePattern", "lambdaPattern")
"""Mappings whose keys are regular expressions on the end of a name."""


@dataclass(frozen=True)
class Written:
    """Names that adapter settings of any method hold, as they are written."""

    place: str
    """Where they stand: method.lora or method.settings."""
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


def written_settings(context: RuleContext) -> Written:
    """Those of the method that the manifest names."""
    method = context.spec.method
    if METHODS[method.type].family is Family.OTHER:
        return Written(SETTINGS, method.settings or {})
    return Written(LORA, (method.lora or LoraSpec()).model_dump(mode="json", by_alias=True))
