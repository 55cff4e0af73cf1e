"""A condition that the API server judges, and the ways in which many of them are written."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.methods import METHODS, Family


@dataclass(frozen=True)
class Condition:
    """A condition that a part of the spec has to meet."""

    rule: str
    """Id in the rule book; `UNREADABLE` where the models' own validators refuse the same."""
    at: str
    """Path under spec of what `self` stands for; empty: the spec itself. Items of a list are `[]`."""
    holds: str
    """CEL, true where all is well."""
    says: str
    field: str = ""
    """Path under `at` of the field that is reported; empty: `at` itself."""

    @property
    def message(self) -> str:
        """What the API server answers."""
        return f"{self.rule}: {self.says}"


def words(words: list[str]) -> str:
    return "[" + ", ".join(f"'{word}'" for word in words) + "]"


def kinds(*families: Family) -> str:
    return words([str(kind) for kind, method in METHODS.items() if method.family in families])


def below_one(rule: str, at: str, name: str) -> Condition:
    return Condition(rule, at, f"!has(self.{name}) || {is_below_one(f'self.{name}')}", f"{name} must be below 1", name)


def is_below_one(number: str) -> str:
    return f"double({number}) < 1.0"


def at_most_one(rule: str, at: str, name: str) -> Condition:
    return Condition(rule, at, f"!has(self.{name}) || double(self.{name}) <= 1.0", f"{name} must be at most 1", name)
