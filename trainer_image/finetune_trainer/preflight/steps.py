"""Preflight as lists of checks: what a check is, what it needs, and how a list is run.

A list is a tuple of steps in the order in which findings are shown. A check returns findings; some also fill in a part of what is
inspected, which later checks need. A step whose needs are not met is left out, and an earlier finding says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from finetune_job.rules.rule import Finding


class Inspection(Protocol):
    """What is inspected: its parts, as far as they are known, and the findings so far."""

    findings: list[Finding]


Seen = TypeVar("Seen", bound=Inspection)


@dataclass(frozen=True)
class Step(Generic[Seen]):
    """A check and its prerequisites."""

    check: Callable[[Seen], Iterable[Finding]]
    needs: tuple[Callable[[Seen], bool], ...] = ()
    """All of these have to hold."""


def run_steps(steps: Iterable[Step[Seen]], seen: Seen) -> None:
    """Run the checks whose needs are met, in order, and add what they find to `seen.findings`."""
    for step in steps:
        if all(is_met(seen) for is_met in step.needs):
            seen.findings.extend(step.check(seen))


def nothing_refused(seen: Inspection) -> bool:
    """Whether no error was found so far."""
    return not any(finding.severity == "error" for finding in seen.findings)
