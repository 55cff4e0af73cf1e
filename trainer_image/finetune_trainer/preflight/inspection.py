"""Defines what preflight knows about a job: an immutable record that three functions fill in and that checks read.

roles/preflight.py lists the functions and the checks. This module does not import torch, because the process that prepares data
must not import it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from finetune_job.finding import Finding
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.added_tokens import AddedTokens
from finetune_trainer.context import RunContext
from finetune_trainer.data.prepare import Preparation
from finetune_trainer.data.render_chat import Tokenizer
from finetune_trainer.data.shards import TRAIN
from finetune_trainer.inspection.model_files import ModelFiles
from finetune_trainer.inspection.report import ModelStructure
from finetune_trainer.preflight.memory import MemoryNeed
from finetune_trainer.processes.child import Child

_NO_FILES = ModelFiles((), "", 0)


@dataclass(frozen=True)
class Inspection:
    """The facts that preflight knows about a job. A part is None until it is inspected, or if a finding says why it cannot be."""

    context: RunContext
    """The job's context. If the job adds tokens, the plan trains their rows."""
    findings: tuple[Finding, ...] = ()
    """The findings of the inspection itself, not of checks, in the order in which they are shown."""
    is_writable: bool = False
    """Whether workspace and output are writable."""
    files: ModelFiles = _NO_FILES
    added: AddedTokens | None = None
    """The job's added tokens, once the base has been written with them."""
    tokenizer: Tokenizer | None = None
    can_be_built: bool = False
    """Whether files and settings are good enough to build the model."""
    model_process: Child | None = None
    """The process that inspects the model; None if this process does."""
    structure: ModelStructure | None = None
    data: Preparation | None = None
    memory: MemoryNeed | None = None

    @property
    def plan(self) -> RunPlan:
        """The job's plan. Once the model's structure is known, the plan includes the choices made for that structure."""
        plan = self.context.plan
        return plan if self.structure is None else plan.with_choices(self.structure.batches)

    def training_data(self) -> Path | None:
        """Returns the directory of the prepared data; None if there are no training records. Raises OSError."""
        if self.data is None or TRAIN not in self.data.splits:
            return None
        return self.data.readable_at(self.context.workspace.prepared)


def is_refused(findings: Iterable[Finding]) -> bool:
    """Whether one of the findings is an error."""
    return any(finding.severity == "error" for finding in findings)
