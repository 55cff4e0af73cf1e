"""The context that a rule examines, the problem that it reports, and the decorator that registers its function.

A rule has two parts: a row in the TOML file of its topic (such as `merging.toml`), which describes it, and a function in the
topic's module (`merging.py`), registered under the row's id, which finds the problem. `book.py` joins the two.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.method import LoraSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.finding import FieldChange
from finetune_job.method_settings import WrongSetting, peft_fields
from finetune_job.methods import METHODS, Family
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan

_UNKNOWN_JOB = JobIdentity(namespace="", name="", uid="")
_NEEDS_QUOTES = re.compile(r"[-+]?\.?[0-9][-+.:0-9a-fox_]*|[-+]?\.(?:inf|nan)|true|false|yes|no|on|off|null|~|", re.IGNORECASE)
"""Matches strings that need quotes because YAML would parse them as another type, such as a number or a time, and a few more."""


@dataclass(frozen=True)
class RuleContext:
    """The input of every rule."""

    spec: FineTuneJobSpec
    profile: FineTuneProfileSpec | None = None
    """The job's profile; None if it is not known, as in `finetune validate` on a laptop."""
    job_name: str = ""
    """Name of the job, after which the workspace claim from the template is named; empty if the job is not known."""

    @cached_property
    def plan(self) -> RunPlan:
        """The plan of this manifest, resolved once for all rules."""
        return resolve(_UNKNOWN_JOB, self.spec, self.profile)

    @property
    def lora(self) -> LoraSpec:
        """`method.lora`, or its defaults."""
        return self.spec.method.lora or LoraSpec()

    @cached_property
    def wrong_settings(self) -> list[WrongSetting]:
        """The mistakes in `method.settings`, for methods that have settings. Computed only once, because it is slow."""
        method = self.spec.method
        entry = METHODS[method.type]
        return peft_fields(method.type, method.settings or {})[1] if entry.family is Family.OTHER and not entry.refused else []


@dataclass(frozen=True)
class Problem:
    """The problem that a check found. Empty fields are filled in from the rule's row."""

    value: Any
    message: str = ""
    """The message; empty to use that of the row."""
    fix: str = ""
    """The fix; empty to use that of the row."""
    field: str = ""
    """Path under `spec`, such as `training.epochs`; empty for the first field that the rule reads."""
    changes: Mapping[str, Any] | None = None
    """New values by path under `spec`; a value of None removes the field. If `changes` itself is None, the row's changes apply;
    if the row has none either, `field` is removed."""


Check = Callable[[RuleContext], Problem | bool | None]
"""A function that returns the problem, if there is one. If its row has `no_effect`, it returns whether the fields have no
effect."""
_Check = TypeVar("_Check", bound=Check)
CHECKS: dict[str, Check] = {}
"""All checks by the id of their rule."""


def rule(identifier: str) -> Callable[[_Check], _Check]:
    """Register the decorated function as the check of the rule with this id."""

    def register(check: _Check) -> _Check:
        if CHECKS.setdefault(identifier, check) is not check:
            raise ValueError(f"two functions check {identifier}")
        return check

    return register


def format_value(value: Any) -> str:
    """Format a value as it appears in a manifest."""
    match value:
        case None:
            return "unset"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return "[" + ", ".join(map(_format_nested, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{key}: {_format_nested(item)}" for key, item in value.items()) + "}"
        case _:
            return str(value)


def _format_nested(value: Any) -> str:
    """Format a value inside a list or mapping, with quotes around strings to distinguish them from numbers."""
    if isinstance(value, str):
        return f'"{value}"'
    return "null" if value is None else format_value(value)


def changes_text(changes: Iterable[FieldChange]) -> str:
    """Describe changes in one line, such as "spec.data.packing: false, spec.training.epochs removed"."""
    return ", ".join(
        f"{change.field} removed" if change.value is None else f"{change.field}: {yaml_text(change.value)}" for change in changes
    )


def yaml_text(value: Any) -> str:
    """Format a value for use after a colon in YAML."""
    return json.dumps(value) if isinstance(value, str) and _NEEDS_QUOTES.fullmatch(value) else format_value(value)


def with_changes(document: dict[str, Any], changes: Iterable[FieldChange]) -> dict[str, Any]:
    """Return a copy of an object with the changes applied. A value on the way to a changed field is replaced by a mapping."""
    changed = copy.deepcopy(document)
    for change in changes:
        *parents, last = change.field.split(".")
        place = changed
        for part in parents:
            if not isinstance(place.get(part), dict):
                if change.value is None:
                    break
                place[part] = {}
            place = place[part]
        else:
            if change.value is None:
                place.pop(last, None)
            else:
                place[last] = copy.deepcopy(change.value)
    return changed
