"""What the API server judges: conditions over an object, and transitions, which compare it with what it was before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from finetune_job.methods import METHODS, Family
from finetune_job.rules.rule_tables import Range


@dataclass(frozen=True)
class CelCondition:
    """A condition that a part of the spec has to meet."""

    rule: str
    """Id in the rule book; `INVALID_FIELD` where the models' own validators refuse the same."""
    at: str
    """Path under spec of `self`; empty: the spec itself. Items of a list are `[]`."""
    holds: str
    """CEL, true where all is well."""
    says: str
    field: str = ""
    """Path under `at` of the field that is reported; empty: `at` itself."""

    @property
    def message(self) -> str:
        """What the API server answers."""
        return f"{self.rule}: {self.says}"


def cel_list(words: list[str]) -> str:
    return "[" + ", ".join(f"'{word}'" for word in words) + "]"


def cel_methods(*families: Family) -> str:
    return cel_list([str(kind) for kind, method in METHODS.items() if method.family in families])


def range_conditions(rows: Iterable[Range]) -> tuple[CelCondition, ...]:
    """The conditions of ranges, of one for each field."""
    return tuple(_range_condition(row, *path.rpartition(".")[::2]) for row in rows for path in row.fields)


def _range_condition(row: Range, at: str, name: str) -> CelCondition:
    return CelCondition(row.rule, at, f"!has(self.{name}) || {row.bounds.cel(f'self.{name}')}", f"{name} {row.says}", name)


@dataclass(frozen=True)
class Transition:
    """A condition over an object and what it was before, which only the API server knows."""

    rule: str
    title: str
    fix: str
    reproduction: str
    """The test that makes it: path of the module, `::` and the name of the test."""


FROZEN = Transition(
    "frozen-after-start",
    "The settings of a job that has started are final; only spec.run can change, without its queueName and priorityClassName",
    "create a new job for other settings",
    "tests/integration/test_api_rules.py::test_spec_is_frozen_once_the_job_has_started",
)
CANCELLED = Transition(
    "cancel-is-final",
    "A cancelled job cannot be revived",
    "create a new job",
    "tests/integration/test_api_rules.py::test_a_cancelled_job_cannot_be_revived",
)
TRANSITIONS = (FROZEN, CANCELLED)
