"""`method.settings`: names, types, ranges, and what of it does not go together."""

from __future__ import annotations

import re
from typing import Any

from finetune_job.api.method import MethodType
from finetune_job.method_settings import effective_settings, known_settings
from finetune_job.methods import METHODS, Family
from finetune_job.rules.method_configuration.setting_conflicts import SETTING_CONFLICTS
from finetune_job.rules.method_configuration.setting_limits import SETTING_LIMITS
from finetune_job.rules.rule import Problem, Reproduction, RuleContext, format_value, rule

_TYPE = "method.type"
_SETTINGS = "method.settings"
_NODES, _PROCESSES = "parallelism.nodes", "parallelism.processesPerNode"
_PEFT = "peft 0.21"
_CLASSES = "peft: the configuration classes under peft/tuners"
_TESTS = "tests/pitfalls/test_method_settings.py"
_TOKENS, _SAVED = "tokenIndices", "modulesToSave"
_M = MethodType


def _settings(context: RuleContext) -> dict[str, Any]:
    """What each setting comes to; none where a name or a type is wrong, which has findings of its own."""
    method = context.spec.method
    entry = METHODS[method.type]
    if entry.family is not Family.OTHER or entry.refused or context.wrong_settings:
        return {}
    return effective_settings(method.type, method.settings or {})


def _format_setting(name: str, value: Any) -> str:
    return format_value({name: value})[1:-1]


@rule(
    "method-setting-unknown",
    "A setting is one of PEFT's own for that method",
    reads=(_TYPE, _SETTINGS),
    sources=(_CLASSES,),
    reproduction=Reproduction(f"{_TESTS}::test_an_unknown_setting", "TypeError: got an unexpected keyword argument"),
    holds_for=_PEFT,
)
def method_setting_unknown(context: RuleContext) -> Problem | None:
    unknown = [each for each in context.wrong_settings if each.is_unknown]
    if not unknown:
        return None
    written = context.spec.method.settings or {}
    changes: dict[str, Any] = {}
    for each in unknown:
        changes[f"{_SETTINGS}.{each.name}"] = None
        if each.near is not None and each.near not in written:
            changes[f"{_SETTINGS}.{each.near}"] = each.value
    first = unknown[0]
    return Problem(
        field=_SETTINGS, value=_format_setting(first.name, first.value), message=first.reason, fix=first.fix, changes=changes
    )


@rule(
    "method-setting-type",
    "A setting has the type that PEFT declares",
    reads=(_TYPE, _SETTINGS),
    sources=(_CLASSES,),
    reproduction=Reproduction(
        f"{_TESTS}::test_a_setting_of_another_type", "TypeError, or no error: PEFT does not look at the types of its settings"
    ),
    holds_for=_PEFT,
)
def method_setting_type(context: RuleContext) -> Problem | None:
    wrong = [each for each in context.wrong_settings if not each.is_unknown]
    if not wrong:
        return None
    known = known_settings(context.spec.method.type)
    first = wrong[0]
    return Problem(
        field=_SETTINGS,
        value=_format_setting(first.name, first.value),
        message=first.reason,
        fix=first.fix,
        changes={f"{_SETTINGS}.{each.name}": _as_meant(each.value, known[each.name].types) for each in wrong},
    )


_WHOLE_NUMBER = re.compile("-?[0-9]{1,18}")


def _as_meant(value: Any, types: tuple[str, ...]) -> Any:
    """The value that was most likely meant, or None."""
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


@rule(
    "method-setting-range",
    "Some values train nothing, or fail once the model is there",
    reads=(_TYPE, _SETTINGS),
    sources=("peft: the layer classes under peft/tuners",),
    reproduction=Reproduction(f"{_TESTS}::test_values_beyond_a_limit", "an exception of PEFT, or no error and nothing is learnt"),
    holds_for=_PEFT,
)
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
        field=_SETTINGS,
        value=_format_setting(name, written[name]) if name in written else f"{name} unset",
        message=f"{name} of {kind}: {limit.otherwise}",
        fix=f"write {limit.wanted}" + ("" if name == _TOKENS else f", or remove {_SETTINGS}.{name}"),
        changes={f"{_SETTINGS}.{name}": _within(name, settings[name]) for name, _ in beyond},
    )


def _within(name: str, value: Any) -> Any:
    """What was most likely meant; None where a default stands for it."""
    if name == _TOKENS:
        return _tokens(value)
    return [value] if name == _SAVED and value else None


def _tokens(written: list[int]) -> list[int]:
    """Those that can be trained, each once; where none is left, one that stands for what only the user can know."""
    return sorted({token for token in written if token >= 0}) or [0]


@rule(
    "method-settings-conflict",
    "Some settings exclude each other",
    reads=(_TYPE, _SETTINGS),
    sources=("peft: __post_init__ of the configuration classes, and the layer classes under peft/tuners",),
    reproduction=Reproduction(
        f"{_TESTS}::test_settings_that_contradict_each_other", "ValueError of PEFT, or no error and nothing is learnt"
    ),
    holds_for=_PEFT,
)
def method_settings_conflict(context: RuleContext) -> Problem | None:
    kind, settings = context.spec.method.type, _settings(context)
    if not settings or method_setting_range.check(context) is not None:
        return None
    found = [each for each in SETTING_CONFLICTS if kind in each.methods and each.exists(settings)]
    if not found:
        return None
    written = context.spec.method.settings or {}
    first = found[0]
    value = _format_setting(first.setting, written[first.setting]) if first.setting in written else f"{first.setting} unset"
    return Problem(
        field=_SETTINGS,
        value=value,
        message=f"{kind}: {first.message}",
        fix=first.fix,
        changes={f"{_SETTINGS}.{name}": new for each in found for name, new in each.changes.items()},
    )


@rule(
    "method-setting-on-one-rank-only",
    "Some settings cannot be sharded",
    reads=(_TYPE, _SETTINGS, _NODES, _PROCESSES),
    sources=(
        "torch: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (only parameters with a gradient are reduced)",
        "peft: peft/tuners/lycoris_utils.py and lokr/layer.py (module_dropout), oft/layer.py (coft)",
    ),
    reproduction=Reproduction(
        "tests/pitfalls/test_sharded_settings.py::test_modules_dropped_on_one_rank_only "
        "tests/pitfalls/test_sharded_settings.py::test_parameters_that_are_projected_in_the_forward_pass",
        "the gang breaks, or ends on other weights than a single rank",
    ),
    holds_for="torch >= 2.6, peft 0.21",
)
def method_setting_on_one_rank_only(context: RuleContext) -> Problem | None:
    parallelism = context.spec.parallelism
    kind, settings = context.spec.method.type, _settings(context)
    if parallelism.nodes * parallelism.processes_per_node == 1 or not settings:
        return None
    found = METHODS[kind].one_rank_setting(settings)
    if found is None:
        return None
    written = (context.spec.method.settings or {})[found.name]
    return Problem(
        field=_SETTINGS,
        value=_format_setting(found.name, written),
        message=f"{found.name} of {kind} works on one rank only: {found.reason}",
        fix=f"remove {_SETTINGS}.{found.name}, or set {_NODES} and {_PROCESSES} to 1",
        changes={f"{_SETTINGS}.{found.name}": None},
    )


_IGNORED: dict[MethodType, tuple[str, str]] = {
    _M.OFT: ("moduleDropout", "PEFT makes the dropout and never calls it"),
}
"""Settings that PEFT takes and does not follow, and why."""


@rule(
    "no-effect-method-setting",
    "PEFT takes some settings and does not follow them",
    severity="warning",
    reads=(_TYPE, _SETTINGS),
    sources=("peft: peft/tuners/oft/layer.py, MultiplicativeDropoutLayer",),
    reproduction=Reproduction(f"{_TESTS}::test_settings_without_effect", "no error: training is the same with and without it"),
    holds_for=_PEFT,
)
def no_effect_method_setting(context: RuleContext) -> Problem | None:
    kind = context.spec.method.type
    name, reason = _IGNORED.get(kind, ("", ""))
    written = context.spec.method.settings or {}
    if not written.get(name) or not _settings(context).get(name):
        return None
    return Problem(
        field=_SETTINGS,
        value=_format_setting(name, written[name]),
        message=f"{name} of {kind} has no effect: {reason}",
        fix=f"remove {_SETTINGS}.{name}",
        changes={f"{_SETTINGS}.{name}": None},
    )


RULES = (
    method_setting_unknown,
    method_setting_type,
    method_setting_range,
    method_settings_conflict,
    method_setting_on_one_rank_only,
    no_effect_method_setting,
)
