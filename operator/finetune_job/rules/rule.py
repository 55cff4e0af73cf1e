"""What a rule is and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from finetune_job.rules.context import RuleContext

UNREADABLE = "unreadable"
"""Stands in place of a rule's id where the input itself is at fault: it is no object of this API."""
Severity = Literal["error", "warning"]
Evidence = Literal["reproduced", "source"]
"""`reproduced`: tests/pitfalls shows the failure on the real libraries. `source`: read in their source or in this product's API."""
Speaks = Literal["ours", "accelerate", "Trainer"]
"""Whose path a rule speaks of: only what fails in `ours` may refuse; the others tell users what happens elsewhere."""


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
    source: str = ""
    """What the rule rests on, and where that stands; empty where the input itself is at fault."""
    changes: tuple[FieldChange, ...] = ()
    """The fix as changes that a program can apply; applying all of them clears this finding."""


@dataclass(frozen=True)
class Reproduction:
    """Where the failure is shown on the real libraries, and what they do."""

    test: str
    """Path of the test module, and `::` with the test's name where one shows it alone."""
    observed: str
    """The exception, or what goes wrong without one."""


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
    holds_for: str
    """Library versions, in words that stand in the catalogue."""
    check: Callable[[RuleContext], Finding | None]
    topic: str
    """The module or package of the book that it stands in: `wrapping`, `quantization` and so on."""
    reproduction: Reproduction | None = None
    speaks_of: Speaks = "ours"
    is_weighed: bool = False
    """Whether only a person can weigh the fix, which gives up something that works: it is told, and no program makes it."""
    in_preflight: str = ""
    """What of it only preflight finds, under the same id; empty where the check here finds all."""

    @property
    def evidence(self) -> Evidence:
        """What the rule rests on."""
        return "source" if self.reproduction is None else "reproduced"
