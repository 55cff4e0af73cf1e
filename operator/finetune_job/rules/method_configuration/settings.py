"""Rules on `method.settings`: names, types, ranges, and settings that contradict each other."""

from __future__ import annotations

import re
from typing import Any

from finetune_job.api.method import MethodType
from finetune_job.method_settings import effective_settings, known_settings
from finetune_job.methods import METHODS, Family
from finetune_job.rules.method_configuration.setting_conflicts import SETTING_CONFLICTS
from finetune_job.rules.method_configuration.setting_limits import SETTING_LIMITS
from finetune_job.rules.rule import Problem, RuleContext, format_value, rule

_SETTINGS = "method.settings"
_NODES, _PROCESSES = "parallelism.nodes", "parallelism.processesPerNode"
_TOKENS, _SAVED = "tokenIndices", "modulesToSave"
_M = MethodType


def _settings(context: RuleContext) -> dict[str, Any]:
    """Return the effective settings; none if a name or type is wrong, which other rules report."""
    method = context.spec.method
    entry = METHODS[method.type]
    if entry.family is not Family.OTHER or entry.refused or context.wrong_settings:
        return {}
    return effective_settings(method.type, method.settings or {})


def _format_setting(name: str, value: Any) -> str:
    return format_value({name: value})[1:-1]


@rule("method-setting-unknown")
def method_setting_unknown(context: RuleContext) -> Problem | None:
    unknown = [setting for setting in context.wrong_settings if setting.is_unknown]
    if not unknown:
        return None
    written = context.spec.method.settings or {}
    changes: dict[str, Any] = {}
    for setting in unknown:
        changes[f"{_SETTINGS}.{setting.name}"] = None
        if setting.near is not None and setting.near not in written:
            changes[f"{_SETTINGS}.{setting.near}"] = setting.value
    first = unknown[0]
    return Problem(
        value=_format_setting(first.name, first.value), message=first.reason, fix=first.fix, field=_SETTINGS, changes=changes
    )


@rule("method-setting-type")
def method_setting_type(context: RuleContext) -> Problem | None:
    wrong = [setting for setting in context.wrong_settings if not setting.is_unknown]
    if not wrong:
        return None
    known = known_settings(context.spec.method.type)
    first = wrong[0]
    return Problem(
        value=_format_setting(first.name, first.value),
        message=first.reason,
        fix=first.fix,
        field=_SETTINGS,
        changes={f"{_SETTINGS}.{each.name}": _as_meant(each.value, known[each.name].types) for each in wrong},
    )


_WHOLE_NUMBER = re.compile("-?[0-9]{1,18}")


def _as_meant(value: Any, types: tuple[str, ...]) -> Any:
    """Return the value of the right type that was most likely meant; None if there is none."""
    if isinstance(value, str):
        if "int" in types and _WHOLE_NUMBER.fullmatch(value):
            return int(value)
        if "bool" in types and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if "list[str]" in types and value:
            return [value]
    if "list[int]" in types and isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return None


@rule("method-setting-range")
def method_setting_range(context: RuleContext) -> Problem | None:
    kind, settings = context.spec.method.type, _settings(context)
    beyond = [
        (name, limit)
        for name in settings
        for limit in SETTING_LIMITS
        if limit.applies_to(kind, name) and not limit.accepts(settings[name])
    ]
    if not beyond:
        return None
    written = context.spec.method.settings or {}
    name, limit = beyond[0]
    return Problem(
        value=_format_setting(name, written[name]) if name in written else f"{name} unset",
        message=f"{name} of {kind}: {limit.otherwise}",
        fix=f"write {limit.wanted}" + ("" if name == _TOKENS else f", or remove {_SETTINGS}.{name}"),
        field=_SETTINGS,
        changes={f"{_SETTINGS}.{name}": _within(name, settings[name]) for name, _ in beyond},
    )


def _within(name: str, value: Any) -> Any:
    """Return the value within the limit that was most likely meant; None for the default."""
    if name == _TOKENS:
        return _tokens(value)
    return [value] if name == _SAVED and value else None


def _tokens(written: list[int]) -> list[int]:
    """Return the valid token ids without duplicates; if there are none, an example that the user has to replace."""
    return sorted({token for token in written if token >= 0}) or [0]


@rule("method-settings-conflict")
def method_settings_conflict(context: RuleContext) -> Problem | None:
    kind, settings = context.spec.method.type, _settings(context)
    if not settings or method_setting_range(context) is not None:
        return None
    conflicts = [conflict for conflict in SETTING_CONFLICTS if kind in conflict.methods and conflict.exists(settings)]
    if not conflicts:
        return None
    written = context.spec.method.settings or {}
    first = conflicts[0]
    value = _format_setting(first.setting, written[first.setting]) if first.setting in written else f"{first.setting} unset"
    return Problem(
        value=value,
        message=f"{kind}: {first.message}",
        fix=first.fix,
        field=_SETTINGS,
        changes={f"{_SETTINGS}.{name}": new for conflict in conflicts for name, new in conflict.changes.items()},
    )


@rule("method-setting-on-one-rank-only")
def method_setting_on_one_rank_only(context: RuleContext) -> Problem | None:
    parallelism = context.spec.parallelism
    kind, settings = context.spec.method.type, _settings(context)
    if parallelism.nodes * parallelism.processes_per_node == 1 or not settings:
        return None
    setting = METHODS[kind].one_rank_setting(settings)
    if setting is None:
        return None
    written = (context.spec.method.settings or {})[setting.name]
    return Problem(
        value=_format_setting(setting.name, written),
        message=f"{setting.name} of {kind} works on one rank only: {setting.reason}",
        fix=f"remove {_SETTINGS}.{setting.name}, or set {_NODES} and {_PROCESSES} to 1",
        field=_SETTINGS,
        changes={f"{_SETTINGS}.{setting.name}": None},
    )


_IGNORED: dict[MethodType, tuple[str, str]] = {_M.OFT: ("moduleDropout", "PEFT makes the dropout and never calls it")}
"""Method -> setting that PEFT accepts but ignores, and the reason."""


@rule("no-effect-method-setting")
def no_effect_method_setting(context: RuleContext) -> Problem | None:
    kind = context.spec.method.type
    name, reason = _IGNORED.get(kind, ("", ""))
    written = context.spec.method.settings or {}
    if not written.get(name) or not _settings(context).get(name):
        return None
    return Problem(
        value=_format_setting(name, written[name]),
        message=f"{name} of {kind} has no effect: {reason}",
        fix=f"remove {_SETTINGS}.{name}",
        field=_SETTINGS,
        changes={f"{_SETTINGS}.{name}": None},
    )
