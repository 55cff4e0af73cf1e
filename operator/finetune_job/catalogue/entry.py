"""One entry of the catalogue: a finding that no rule of the rule book makes, declared once.

The module that makes the finding names the entry by its id; what it adds is what differs from job to job: the field, the value,
the message and the fix in this case.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from finetune_job.finding import Severity

EITHER: Literal["either"] = "either"
"""Severity of an entry that refuses some jobs and only warns of others."""


class Gate(StrEnum):
    """Which step of a job's admission makes the finding, or what is done after it."""

    SCHEMA = "schema"
    """Reading the manifest: `finetune validate`, the operator, and the API server for what its schema can say."""
    RULES = "rules"
    """The rule book: `finetune validate` and the operator."""
    PREFLIGHT = "preflight"
    """The preflight pod, with the real model and data, before any GPU is held; and `finetune run`."""
    REHEARSAL = "rehearsal"
    """The rehearsal at the end of preflight, and `finetune rehearse`."""
    AUDIT = "audit"
    """After a run has ended: `finetune audit` and `finetune reproduce`."""


@dataclass(frozen=True)
class Entry:
    """What can be said about a finding without looking at a job."""

    id: str
    severity: Severity | Literal["either"]
    title: str
    """What is wrong, as one clause."""
    why: str
    """What would happen without the finding, in a sentence or two."""
    fix: str
    """What to do, as one sentence without a full stop."""
    reproduction: str = ""
    """The test that makes the finding: path of the module, `::` and the name of the test."""
    not_reproduced: str = ""
    """Why no test makes it; exactly one of the two is set."""
    gate: Gate = Gate.PREFLIGHT
