"""What a rule is and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from finetune_job.rules.context import RuleContext

Severity = Literal["error", "warning"]
Evidence = Literal["reproduced", "source"]
"""`reproduced`: tests/pitfalls shows the failure on the real libraries. `source`: read in their source, needs a device to show."""


class FieldChange(BaseModel):
    """One change of the manifest that would make it acceptable."""

    model_config = ConfigDict(frozen=True)
    field: str
    """Path under the object, such as `spec.parallelism.fsdp.useOrigParams`."""
    value: Any
    """New value; None removes the field."""


class Finding(BaseModel):
    """What a rule or preflight has to say about a job."""

    model_config = ConfigDict(frozen=True)
    rule: str
    severity: Severity
    field: str
    value: str
    message: str
    """Why this cannot work, or what it means."""
    fix: str
    """What to write instead."""
    changes: tuple[FieldChange, ...] = ()
    """The fix as changes that a program can apply; applying all of them clears this finding."""


@dataclass(frozen=True)
class Rule:
    """One documented pitfall."""

    id: str
    title: str
    severity: Severity
    reads: tuple[str, ...]
    """Fields that the check looks at."""
    sources: tuple[str, ...]
    """Where the pitfall is documented."""
    evidence: Evidence
    holds_for: str
    """Library versions, in words that stand in the catalogue."""
    check: Callable[[RuleContext], Finding | None]
