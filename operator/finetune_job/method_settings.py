"""Converts `method.settings` of a manifest to the fields of PEFT's configuration class, or reports what is wrong.

Names are PEFT's field names in camelCase; types are those that PEFT's class declares (peft_settings.py). A numeric string is
converted if the field is a float, because the spec has no floats. Rules, preflight and trainer all use this module.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune_job.api.method import ALL_LINEAR, MethodType, is_decimal
from finetune_job.methods import METHODS
from finetune_job.peft_settings import SETTINGS

TARGETS = "targetModules"
TRAINED_ROWS_SETTING = "tokenIndices"
"""The setting of TrainableTokens that lists the rows to train."""
PATTERNS = ("rankPattern", "alphaPattern")
"""Mappings whose keys are regular expressions that match the end of a module's name."""


@dataclass(frozen=True)
class Setting:
    """A field of a method's PEFT configuration, beyond the fields that all configurations share."""

    name: str
    """Name of the setting in `method.settings`, in camelCase."""
    peft_name: str
    types: tuple[str, ...]
    """Accepted types: int, float, bool, str, None, list, list[int], list[str], dict, or a word in quotes."""
    default: Any


@dataclass(frozen=True)
class WrongSetting:
    """A setting that PEFT's configuration does not accept."""

    name: str
    """Name of the setting in camelCase, as written."""
    value: Any
    reason: str
    fix: str
    is_unknown: bool
    """Whether no setting has that name."""
    near: str | None = None
    """The name that was most likely meant; None if no name is close enough."""


def known_settings(method: MethodType) -> dict[str, Setting]:
    """Return all settings of a method by name; empty for methods without settings."""
    return {
        name: Setting(name, peft_name, tuple(types.split(" | ")), default)
        for name, (peft_name, types, default) in SETTINGS.get(method.value, {}).items()
    }


def peft_fields(method: MethodType, settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[WrongSetting]]:
    """Return the values by PEFT's field names, ready for its configuration class, and all mistakes in the settings."""
    known = known_settings(method)
    values: dict[str, Any] = {}
    wrong = []
    for name, value in settings.items():
        if name not in known:
            wrong.append(_unknown(method, name, value, known))
            continue
        setting = known[name]
        taken = _with_fractions(value, setting.types)
        if any(_is(taken, kind) for kind in setting.types):
            values[setting.peft_name] = taken
        else:
            expected = _shown_types(setting.types)
            reason = f"{name} of {method.value} takes {expected}"
            wrong.append(WrongSetting(name, value, reason, f"write {expected}, or remove it", is_unknown=False))
    if METHODS[method].targets_all_linear and TARGETS in known:
        targets = known[TARGETS].peft_name
        if values.get(targets) in (None, [ALL_LINEAR]):
            values[targets] = ALL_LINEAR
    return values, wrong


def effective_settings(method: MethodType, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return each setting's effective value by name: the manifest's value, with numeric strings converted, or PEFT's default.

    Settings with a mistake, as `peft_fields` reports it, are returned unchanged.
    """
    known = known_settings(method)
    defaults = {name: setting.default for name, setting in known.items()}
    if METHODS[method].targets_all_linear and TARGETS in known:
        defaults[TARGETS] = ALL_LINEAR
    written = {name: _with_fractions(value, known[name].types) for name, value in settings.items() if name in known}
    if written.get(TARGETS, ...) is None:
        del written[TARGETS]
    return defaults | written


def _unknown(method: MethodType, name: str, value: Any, known: Mapping[str, Setting]) -> WrongSetting:
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    names = [by_lower[lower] for lower in near]
    hint = f"did you mean {' or '.join(names)}? " if names else "remove it. "
    reason = f"PEFT's configuration of {method.value} has no {name}"
    fix = f"{hint}It has {', '.join(sorted(known))}"
    likely = names[0] if names and difflib.SequenceMatcher(None, name.lower(), near[0]).ratio() >= _LIKELY else None
    return WrongSetting(name, value, reason, fix, is_unknown=True, near=likely)


_LIKELY = 0.8
"""Minimum similarity at which an unknown name counts as a misspelling of a known one."""


def _with_fractions(value: Any, types: tuple[str, ...]) -> Any:
    """Convert a numeric string to a float if the field accepts floats but not strings."""
    if isinstance(value, str) and "float" in types and "str" not in types and is_decimal(value):
        return float(value)
    return value


_PLAIN: dict[str, type] = {"str": str, "bool": bool, "list": list, "dict": dict}


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "None":
            return value is None
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "list[int]" | "list[str]":
            return isinstance(value, list) and all(_is(item, kind[5:-1]) for item in value)
        case _ if kind in _PLAIN:
            return isinstance(value, _PLAIN[kind])
        case _:
            return bool(value == kind.strip("'")) and isinstance(value, str)


_WORDS = {
    "int": "a whole number",
    "float": 'a number in quotes such as "0.1"',
    "bool": "true or false",
    "str": "a string",
    "list": "a list",
    "dict": "a mapping",
    "list[int]": "a list of whole numbers",
    "list[str]": "a list of names",
}


def _shown_types(types: tuple[str, ...]) -> str:
    return " or ".join(_WORDS.get(kind, kind.strip("'")) for kind in types if kind != "None")
