"""Values that the user left open, collected with the reason for what they became."""

from __future__ import annotations

from typing import TypeVar

from finetune_job.plan.run_plan import (
    Choice,
)

T = TypeVar("T")


class Choices:
    """Collects what was left open."""

    def __init__(self) -> None:
        self.made: list[Choice] = []

    def pick(self, field: str, given: T | None, otherwise: T, reason: str) -> T:
        if given is not None:
            return given
        self.made.append(Choice(field=f"spec.{field}", value=otherwise, reason=reason))
        return otherwise


def number(text: str | None) -> float | None:
    return None if text is None else float(text)
