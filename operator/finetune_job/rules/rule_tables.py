"""Rules that are rows of a table: ranges of numbers, and settings that have no effect under other settings.

The schema has no minimum and maximum for ranges, because a number with a fraction is a string in a spec; a row also makes the
condition by which the API server refuses the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from finetune_job.api.inputs import SecretKeyRef, SecretRef
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.rules.rule import OURS, Problem, Reproduction, Rule, RuleContext, rule


@dataclass(frozen=True)
class SpecField:
    """Where a field is in the models, and its default."""

    attributes: tuple[str, ...]
    default: Any

    def read(self, spec: FineTuneJobSpec) -> Any:
        """The field's value; None where it or what it belongs to is unset."""
        value: Any = spec
        for name in self.attributes:
            value = None if value is None else getattr(value, name)
        return value


def spec_field(path: str) -> SpecField:
    """The field at a path under `spec`, such as `training.epochs`. Raises LookupError if there is none."""
    model: type[BaseModel] | None = FineTuneJobSpec
    attributes: list[str] = []
    default: Any = None
    for part in path.split("."):
        found = [] if model is None else [item for item in model.model_fields.items() if to_camel(item[0]) == part]
        if not found:
            raise LookupError(f"a spec has no field {path}")
        ((name, info),) = found
        attributes.append(name)
        default = info.default
        types = (info.annotation, *get_args(info.annotation))
        model = next((each for each in types if isinstance(each, type) and issubclass(each, BaseModel)), None)
    return SpecField(tuple(attributes), default)


_COMPARISONS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "<": ("below", operator.lt),
    "<=": ("at most", operator.le),
    ">": ("more than", operator.gt),
    ">=": ("at least", operator.ge),
}


@dataclass(frozen=True)
class Bounds:
    """What a number has to meet: pairs of comparison and limit.

    Rules and the API server read it as a double, with which everything is computed.
    """

    limits: tuple[tuple[str, float], ...]

    def hold(self, written: str) -> bool:
        """Whether a number is within the bounds."""
        return all(_COMPARISONS[sign][1](float(written), limit) for sign, limit in self.limits)

    def cel(self, number: str) -> str:
        """The same as a condition in CEL over `number`, an expression for the written number."""
        return " && ".join(f"double({number}) {sign} {limit!r}" for sign, limit in self.limits)

    def __str__(self) -> str:
        return " and ".join(f"{_COMPARISONS[sign][0]} {limit:g}" for sign, limit in self.limits)


BELOW_1 = Bounds((("<", 1.0),))
AT_MOST_1 = Bounds((("<=", 1.0),))
AT_LEAST_1 = Bounds(((">=", 1.0),))
ABOVE_0 = Bounds(((">", 0.0),))


@dataclass(frozen=True)
class Range:
    """The range of one field, or of several for one reason."""

    rule: str
    title: str
    fields: tuple[str, ...]
    """Paths under `spec`."""
    bounds: Bounds
    message: str
    """What happens beyond the bounds."""
    write: str
    """What to write instead, after "write"."""
    sources: tuple[str, ...]
    holds_for: str
    reproduction: Reproduction

    @property
    def says(self) -> str:
        """The answer of the API server, after the name of the field."""
        return f"must be {self.bounds}; write {self.write}"


def range_rules(module: str, rows: Iterable[Range]) -> tuple[Rule, ...]:
    """The rule of each row. `module`: name of the topic module that holds the rows."""
    return tuple(_range_rule(module, row) for row in rows)


def _range_rule(module: str, row: Range) -> Rule:
    fields = {path: spec_field(path) for path in row.fields}

    @rule(
        row.rule,
        row.title,
        reads=row.fields,
        sources=row.sources,
        holds_for=row.holds_for,
        reproduction=row.reproduction,
        module=module,
    )
    def check(context: RuleContext) -> Problem | None:
        written = {path: field.read(context.spec) for path, field in fields.items()}
        wrong = {path: value for path, value in written.items() if value is not None and not row.bounds.hold(value)}
        if not wrong:
            return None
        path, value = next(iter(wrong.items()))
        return Problem(
            field=path,
            value=value,
            message=row.message,
            fix=f"write {row.write}, or remove {path}",
            changes=dict.fromkeys(wrong),
        )

    return check


@dataclass(frozen=True)
class Unusual:
    """A number that works and is far from those with which people train."""

    rule: str
    title: str
    field: str
    """Path under `spec`."""
    bounds: Bounds
    """Within them nothing is said."""
    told_otherwise: Bounds
    """Beyond these another rule refuses it."""
    message: str
    """What happens beyond the bounds."""
    usual: str
    """After "write"."""
    sources: tuple[str, ...]
    not_reproduced: str


def unusual_rules(module: str, rows: Iterable[Unusual]) -> tuple[Rule, ...]:
    """The rule of each row. `module`: name of the topic module that holds the rows."""
    return tuple(_unusual_rule(module, row) for row in rows)


def _unusual_rule(module: str, row: Unusual) -> Rule:
    field = spec_field(row.field)

    @rule(
        row.rule,
        row.title,
        severity="warning",
        reads=(row.field,),
        sources=row.sources,
        holds_for=OURS,
        needs_human=True,
        not_reproduced=row.not_reproduced,
        module=module,
    )
    def check(context: RuleContext) -> Problem | None:
        written = field.read(context.spec)
        if written is None or row.bounds.hold(written) or not row.told_otherwise.hold(written):
            return None
        return Problem(
            field=row.field,
            value=written,
            message=row.message,
            fix=f"write {row.usual}, or remove {row.field}",
            changes={row.field: None},
        )

    return check


SAME_PLAN = Reproduction(
    "tests/pitfalls/test_no_effect.py::test_what_nothing_reads",
    "no error: the run's plan is the same with and without it",
)


@dataclass(frozen=True)
class NoEffect:
    """Fields that nothing reads under some condition."""

    rule: str
    title: str
    fields: tuple[str, ...]
    """Paths under `spec`. What has its default counts as unset: the API server writes defaults into every object."""
    depends_on: tuple[str, ...]
    """Paths under `spec` of what decides whether they are read."""
    is_unread: Callable[[RuleContext], bool]
    why: str
    """Why they have no effect, after "NoEffect: "."""
    reproduction: Reproduction
    instead: str = ""
    """What to do to give them an effect, before ", or remove"; empty: nothing does."""


def no_effect_rules(module: str, rows: Iterable[NoEffect]) -> tuple[Rule, ...]:
    """The rule of each row. `module`: name of the topic module that holds the rows."""
    return tuple(_no_effect_rule(module, row) for row in rows)


def _no_effect_rule(module: str, row: NoEffect) -> Rule:
    fields = {path: spec_field(path) for path in row.fields}

    @rule(
        row.rule,
        row.title,
        severity="warning",
        reads=(*row.fields, *row.depends_on),
        sources=("this product's API",),
        holds_for=OURS,
        reproduction=row.reproduction,
        module=module,
    )
    def check(context: RuleContext) -> Problem | None:
        written = {path: field.read(context.spec) for path, field in fields.items()}
        unread = {path: value for path, value in written.items() if value not in (None, fields[path].default)}
        if not unread or not row.is_unread(context):
            return None
        path, value = next(iter(unread.items()))
        remove = f"remove {', '.join(unread)}"
        return Problem(
            field=path,
            value=value.name if isinstance(value, SecretRef | SecretKeyRef) else value,
            message=f"NoEffect: {row.why}",
            fix=f"{row.instead}, or {remove}" if row.instead else remove,
            changes=dict.fromkeys(unread),
        )

    return check
