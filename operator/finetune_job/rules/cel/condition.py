"""Conditions that the API server checks on an object, and transitions, which also compare it with its earlier state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from finetune_job.methods import METHODS, Family
from finetune_job.rules.book import RULES


@dataclass(frozen=True)
class CelCondition:
    """A condition that a part of the spec has to meet."""

    rule: str
    """Id of the rule in the rule book; `INVALID_FIELD` if the pydantic validators refuse the same objects."""
    at: str
    """Path under `spec` of what `self` means in the condition; empty for the spec itself. `[]` stands for each item of a list."""
    holds: str
    """The condition in CEL, true if the object is accepted."""
    says: str
    field: str = ""
    """Path, relative to `at`, of the field to report; empty for `at` itself."""

    @property
    def message(self) -> str:
        """The message with which the API server rejects the object."""
        return f"{self.rule}: {self.says}"


def cel_list(words: list[str]) -> str:
    return "[" + ", ".join(f"'{word}'" for word in words) + "]"


def cel_methods(*families: Family) -> str:
    return cel_list([str(kind) for kind, method in METHODS.items() if method.family in families])


def range_conditions(topic: str) -> Iterator[CelCondition]:
    """Yield a condition for each field of a topic's ranges, except ranges that only warn."""
    for rule in RULES:
        if rule.topic == topic and rule.range is not None and rule.severity == "error":
            for path in rule.paths:
                at, _, name = path.rpartition(".")
                holds = f"!has(self.{name}) || {rule.range.within.cel(f'self.{name}')}"
                yield CelCondition(rule.id, at, holds, f"{name} {rule.range.says}", name)


@dataclass(frozen=True)
class Transition:
    """A condition that compares an object with its earlier state, which only the API server knows."""

    rule: str
    title: str
    fix: str
    reproduction: str
    """The test that attempts the transition: path of the module, `::` and the name of the test."""


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
