"""PURE. `method.settings` of the plan -> the fields of PEFT's configuration class, or what is wrong with them.

Names are PEFT's in camelCase; the types are those that the fields of the class declare. Strings with a number become numbers where
the field takes a fraction, because the spec has no floats.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Union

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from pydantic import ConfigDict, TypeAdapter, ValidationError

from finetune_job.api.method import ALL_LINEAR, MethodType, is_decimal
from finetune_job.methods import METHODS

TARGETS = "target_modules"


@dataclass(frozen=True)
class WrongSetting:
    """A setting that PEFT's configuration does not take."""

    name: str
    """camelCase, as written."""
    value: Any
    reason: str
    fix: str


def config_class(method: MethodType) -> type[PeftConfig]:
    """PEFT's configuration class of a method that has an adapter."""
    found: type[PeftConfig] = PEFT_TYPE_TO_CONFIG_MAPPING[METHODS[method].peft_type]
    return found


@cache
def known_settings(method: MethodType) -> dict[str, tuple[str, Any]]:
    """Name in camelCase -> PEFT's name and declared type, of every field that the method adds to PEFT's common ones."""
    chosen = config_class(method)
    common = {field.name for field in dataclasses.fields(PeftConfig)}
    declared = typing.get_type_hints(chosen)
    fields = [field.name for field in dataclasses.fields(chosen) if field.name not in common]
    return {camel_case(name): (name, declared[name]) for name in fields}


def peft_fields(method: MethodType, settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[WrongSetting]]:
    """Values by PEFT's field names, ready for the configuration class, and everything that is wrong."""
    known = known_settings(method)
    values: dict[str, Any] = {}
    wrong = []
    for name, value in settings.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}? " if near else "remove it. "
            reason = f"{config_class(method).__name__} of PEFT has no such field"
            wrong.append(WrongSetting(name, value, reason, f"{hint}It has {', '.join(sorted(known))}"))
            continue
        field, declared = known[name]
        value = _with_fractions(value, declared)
        try:
            values[field] = TypeAdapter(declared, config=_STRICT).validate_python(value)
        except ValidationError as error:
            wrong.append(WrongSetting(name, value, _reason(error), f"write {_shown_type(declared)}, or remove it"))
    if METHODS[method].targets_all_linear and TARGETS in {field for field, _ in known.values()}:
        values.setdefault(TARGETS, ALL_LINEAR)
        if values[TARGETS] == [ALL_LINEAR]:
            values[TARGETS] = ALL_LINEAR
    return values, wrong


_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


def camel_case(name: str) -> str:
    """`target_modules` -> `targetModules`, `config_A_B` -> `configAB`."""
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def _members(declared: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    if typing.get_origin(declared) in (Union, types.UnionType):
        return tuple(member for part in typing.get_args(declared) for member in _members(part))
    return (declared,)


def _with_fractions(value: Any, declared: Any) -> Any:
    """Numbers for strings, where the field takes a fraction and no text; also inside lists and mappings."""
    members = _members(declared)
    if isinstance(value, str):
        return float(value) if float in members and str not in members and is_decimal(value) else value
    for member in members:
        arguments = typing.get_args(member)
        if isinstance(value, list) and typing.get_origin(member) is list:
            return [_with_fractions(item, arguments[0]) for item in value]
        if isinstance(value, dict) and typing.get_origin(member) is dict:
            return {key: _with_fractions(item, arguments[1]) for key, item in value.items()}
    return value


def _reason(error: ValidationError) -> str:
    """The first of pydantic's reasons, without the place inside unions."""
    return "; ".join(dict.fromkeys(each["msg"] for each in error.errors()))


def _shown_type(declared: Any) -> str:
    words = {int: "a whole number", float: 'a number in quotes such as "0.1"', bool: "true or false", str: "a string"}
    shown = []
    for member in _members(declared):
        if member is types.NoneType:
            continue
        if typing.get_origin(member) is typing.Literal:
            shown += [str(choice) for choice in typing.get_args(member)]
        elif typing.get_origin(member) is list or member is list:
            shown.append("a list")
        elif typing.get_origin(member) is dict or member is dict:
            shown.append("a mapping")
        else:
            shown.append(words.get(member, str(member)))
    return " or ".join(shown)
