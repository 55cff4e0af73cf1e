"""What a rule is: what it may look at (a job, a profile and nothing else), how a topic defines one, what it finds.

A check returns a `Problem`; the rule makes it a `Finding`, whose changes `with_changes` applies to a manifest.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.method import LoraSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.finding import FieldChange, Finding, Severity
from finetune_job.method_settings import WrongSetting, peft_fields
from finetune_job.methods import METHODS, Family
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan

_UNKNOWN_JOB = JobIdentity(namespace="", name="", uid="")
Evidence = Literal["reproduced", "source"]
"""`reproduced`: tests/pitfalls shows the failure on the real libraries. `source`: read in their source or in this product's
API."""
AppliesTo = Literal["ours", "accelerate", "Trainer"]
"""Whose path a rule speaks of: only what fails in `ours` may refuse; the others tell users what happens elsewhere."""
OURS = "this trainer, every version"
"""`holds_for` of rules that follow from how this product works and not from a library."""
_BOOK = __name__.rpartition(".")[0]
_NEEDS_QUOTES = re.compile(r"[-+]?\.?[0-9][-+.:0-9a-fox_]*|[-+]?\.(?:inf|nan)|true|false|yes|no|on|off|null|~|", re.IGNORECASE)
"""Texts that YAML reads as something else where they have no quotes, such as numbers, times and hexadecimals; and some more."""


@dataclass(frozen=True)
class RuleContext:
    """Input of every rule."""

    spec: FineTuneJobSpec
    profile: FineTuneProfileSpec | None = None
    """None if no profile is known, as in `finetune validate` on a laptop without one."""
    job_name: str = ""
    """By which the claim of the workspace's template is called; empty if the job is not known."""

    @cached_property
    def plan(self) -> RunPlan:
        """The plan that this manifest would get, made once for all rules."""
        return resolve(_UNKNOWN_JOB, self.spec, self.profile)

    @property
    def lora(self) -> LoraSpec:
        """`method.lora`, or its defaults."""
        return self.spec.method.lora or LoraSpec()

    @cached_property
    def wrong_settings(self) -> list[WrongSetting]:
        """What is wrong with `method.settings`, for the methods that have any. Finding near names is slow, so it is done once."""
        method = self.spec.method
        entry = METHODS[method.type]
        return peft_fields(method.type, method.settings or {})[1] if entry.family is Family.OTHER and not entry.refused else []


@dataclass(frozen=True)
class Reproduction:
    """Where the failure is shown on the real libraries, and what they do."""

    test: str
    """Path of the test module, and `::` with the test's name where one shows it alone."""
    observed: str
    """The exception, or what goes wrong without one."""


@dataclass(frozen=True)
class Rule:
    """One documented pitfall."""

    id: str
    title: str
    severity: Severity
    reads: tuple[str, ...]
    """Fields that the check looks at."""
    sources: tuple[str, ...]
    """Where the pitfall is documented."""
    holds_for: str
    """Library versions, in words for the catalogue."""
    check: Callable[[RuleContext], Finding | None]
    topic: str
    """The module or package of the book that holds it: `wrapping`, `quantization` and so on."""
    reproduction: Reproduction | None = None
    not_reproduced: str = ""
    """Why no test shows it on the real libraries; exactly one of the two is set."""
    applies_to: AppliesTo = "ours"
    needs_human: bool = False
    """Whether only a person can weigh the fix, which gives up something that works: it is told, and no program makes it."""
    in_preflight: str = ""
    """What of it only preflight finds, under the same id; empty where the check here finds all."""

    @property
    def evidence(self) -> Evidence:
        """What the rule rests on."""
        return "source" if self.reproduction is None else "reproduced"


@dataclass(frozen=True)
class Problem:
    """What a check found; with the rule's id and severity it becomes a `Finding`."""

    field: str
    """Path under `spec`, such as `training.epochs`."""
    value: Any
    message: str
    fix: str
    changes: Mapping[str, Any]
    """New value by path under `spec`; None removes the field."""


Check = Callable[[RuleContext], Problem | None]


def format_value(value: Any) -> str:
    """A value as the manifest writes it."""
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
    """The same inside a list or a mapping, where a text is told from a number by its quotes."""
    if isinstance(value, str):
        return f'"{value}"'
    return "null" if value is None else format_value(value)


def _plain_value(value: Any) -> Any:
    """What JSON and YAML know: the word itself for a member of an enumeration."""
    return str(value) if isinstance(value, StrEnum) else value


def rule(
    identifier: str,
    title: str,
    *,
    severity: Severity = "error",
    reads: tuple[str, ...],
    sources: tuple[str, ...],
    holds_for: str,
    reproduction: Reproduction | None = None,
    not_reproduced: str = "",
    applies_to: AppliesTo = "ours",
    needs_human: bool = False,
    in_preflight: str = "",
    module: str = "",
) -> Callable[[Check], Rule]:
    """Turn a check function into a `Rule`.

    `reads`: paths under `spec`. `module`: the topic module of the rule, if its check is made elsewhere, from a row of a table.
    """

    def made(check: Check) -> Rule:
        def find(context: RuleContext) -> Finding | None:
            problem = check(context)
            return None if problem is None else finding_from(this, problem)

        this = Rule(
            id=identifier,
            title=title,
            severity=severity,
            reads=tuple(f"spec.{path}" for path in reads),
            sources=sources,
            holds_for=holds_for,
            check=find,
            topic=(module or check.__module__).removeprefix(f"{_BOOK}.").partition(".")[0],
            reproduction=reproduction,
            not_reproduced=not_reproduced,
            applies_to=applies_to,
            needs_human=needs_human,
            in_preflight=in_preflight,
        )
        return this

    return made


def finding_from(rule: Rule, problem: Problem) -> Finding:
    """The finding by which a rule tells a problem."""
    basis = "source" if rule.reproduction is None else f"reproduced by {rule.reproduction.test}"
    return Finding(
        rule=rule.id,
        severity=rule.severity,
        field=f"spec.{problem.field}",
        value=format_value(problem.value),
        message=problem.message,
        fix=problem.fix,
        source=f"{basis}: {'; '.join(rule.sources)}",
        changes=tuple(FieldChange(field=f"spec.{path}", value=_plain_value(value)) for path, value in problem.changes.items()),
    )


def changes_text(changes: Iterable[FieldChange]) -> str:
    """In one line, as in "spec.data.packing: false, spec.training.epochs removed"."""
    return ", ".join(
        f"{change.field} removed" if change.value is None else f"{change.field}: {yaml_text(change.value)}" for change in changes
    )


def yaml_text(value: Any) -> str:
    """A value as it is written behind a colon in YAML."""
    return json.dumps(value) if isinstance(value, str) and _NEEDS_QUOTES.fullmatch(value) else format_value(value)


def with_changes(document: dict[str, Any], changes: Iterable[FieldChange]) -> dict[str, Any]:
    """A copy of an object with the changes made. What blocks a path that leads further is replaced by a mapping."""
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
