"""Ranges of numbers: a row makes the rule, and the condition by which the API server refuses the same.

The schema has no minimum and maximum for them, because a number with a fraction is a string in a spec.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import Problem, rule
from finetune_job.rules.fields import spec_field
from finetune_job.rules.rule import Reproduction, Rule

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
