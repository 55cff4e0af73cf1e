"""What only the API server can refuse: changes of an object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Transition:
    """A condition over an object and what it was before, which only the API server knows."""

    rule: str
    title: str
    fix: str


FROZEN = Transition(
    "frozen-after-start",
    "The settings of a job that has started are final; only spec.run can change, without its queueName and priorityClassName",
    "create a new job for other settings",
)
CANCELLED = Transition("cancel-is-final", "A cancelled job cannot be revived", "create a new job")
TRANSITIONS = (FROZEN, CANCELLED)
