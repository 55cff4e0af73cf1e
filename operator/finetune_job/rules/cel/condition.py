"""A condition that the API server judges, and the ways in which many of them are written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from finetune_job.methods import METHODS, Family
from finetune_job.rules.ranges import Range


@dataclass(frozen=True)
class Condition:
    """A condition that a part of the spec has to meet."""

    rule: str
    """Id in the rule book; `UNREADABLE` where the models' own validators refuse the same."""
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


def words(words: list[str]) -> str:
    return "[" + ", ".join(f"'{word}'" for word in words) + "]"


def kinds(*families: Family) -> str:
    return words([str(kind) for kind, method in METHODS.items() if method.family in families])


def within(rows: Iterable[Range]) -> tuple[Condition, ...]:
    """The conditions of ranges, of one for each field."""
    return tuple(_within(row, *path.rpartition(".")[::2]) for row in rows for path in row.fields)


def _within(row: Range, at: str, name: str) -> Condition:
    return Condition(row.rule, at, f"!has(self.{name}) || {row.bounds.cel(f'self.{name}')}", f"{name} {row.says}", name)
