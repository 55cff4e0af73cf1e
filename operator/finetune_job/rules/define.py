"""How a topic module writes a rule down: the check returns a `Problem`, and rule id and severity are written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from finetune_job.rules.context import RuleContext
from finetune_job.rules.rule import FieldChange, Finding, Reproduction, Rule, Severity, Speaks

OURS = "this trainer, every version"
"""`holds_for` of rules that follow from how this product works and not from a library."""


_BOOK = __name__.rpartition(".")[0]


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


def shown(value: Any) -> str:
    """A value as the manifest writes it."""
    match value:
        case None:
            return "unset"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return "[" + ", ".join(map(_inside, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{key}: {_inside(item)}" for key, item in value.items()) + "}"
        case _:
            return str(value)


def _inside(value: Any) -> str:
    """The same inside a list or a mapping, where a text is told from a number by its quotes."""
    if isinstance(value, str):
        return f'"{value}"'
    return "null" if value is None else shown(value)


def _plain(value: Any) -> Any:
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
    speaks_of: Speaks = "ours",
    is_weighed: bool = False,
    in_preflight: str = "",
    module: str = "",
) -> Callable[[Check], Rule]:
    """Turn a check function into a `Rule`.

    `reads`: paths under `spec`. `module`: the topic module of the rule, if its check is made elsewhere, from a row of a table.
    """

    def made(check: Check) -> Rule:
        def find(context: RuleContext) -> Finding | None:
            problem = check(context)
            return None if problem is None else finding_of(this, problem)

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
            speaks_of=speaks_of,
            is_weighed=is_weighed,
            in_preflight=in_preflight,
        )
        return this

    return made


def finding_of(rule: Rule, problem: Problem) -> Finding:
    """The finding by which a rule tells a problem."""
    basis = "source" if rule.reproduction is None else f"reproduced by {rule.reproduction.test}"
    return Finding(
        rule=rule.id,
        severity=rule.severity,
        field=f"spec.{problem.field}",
        value=shown(problem.value),
        message=problem.message,
        fix=problem.fix,
        source=f"{basis}: {'; '.join(rule.sources)}",
        changes=tuple(FieldChange(field=f"spec.{path}", value=_plain(value)) for path, value in problem.changes.items()),
    )
