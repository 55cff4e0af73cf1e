"""Defines preflight as lists of checks: what a check needs, how a list is run, and what is inspected of a job.

A check returns findings; some also fill in a part of the inspection that later checks need. A check whose needs are not met
is left out, and an earlier finding says why. This module does without torch, as the process that prepares the data does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from finetune_job.finding import Finding
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.added_tokens import AddedTokens
from finetune_trainer.context import RunContext
from finetune_trainer.data.prepare import Preparation
from finetune_trainer.data.render_chat import Tokenizer
from finetune_trainer.data.shards import TRAIN
from finetune_trainer.inspection.model_files import ModelFiles
from finetune_trainer.inspection.report import SKIPPED, ModelStructure, RehearsalReport
from finetune_trainer.inspection.special_files import UNUSABLE_FILE
from finetune_trainer.preflight.memory import MemoryNeed


class Inspection(Protocol):
    """An inspection: its parts, as far as they are known, and the findings so far."""

    findings: list[Finding]


Seen = TypeVar("Seen", bound=Inspection)


@dataclass(frozen=True)
class CheckStep(Generic[Seen]):
    """A check and its prerequisites."""

    check: Callable[[Seen], Iterable[Finding]]
    needs: tuple[Callable[[Seen], bool], ...] = ()
    """Conditions that all have to be true."""


def run_steps(steps: Iterable[CheckStep[Seen]], seen: Seen) -> None:
    """Runs the checks whose needs are met, in order, and adds their findings to `seen.findings`."""
    for step in steps:
        if all(is_met(seen) for is_met in step.needs):
            seen.findings.extend(step.check(seen))


def nothing_refused(seen: Inspection) -> bool:
    """Whether no error was found so far."""
    return not any(finding.severity == "error" for finding in seen.findings)


@dataclass
class JobInspection:
    """The inspection of a job. A part is None until a check has filled it in, or if that check failed."""

    context: RunContext
    findings: list[Finding] = field(default_factory=list)
    storage_is_ready: bool = False
    files: ModelFiles | None = None
    added: AddedTokens | None = None
    """Tokens that the base lacks, once the base has been written with them."""
    tokenizer: Tokenizer | None = None
    expressions_compile: bool = False
    structure: ModelStructure | None = None
    data: Preparation | None = None
    memory: MemoryNeed | None = None
    rehearsal: RehearsalReport = SKIPPED
    until_done: ExitStack = field(default_factory=ExitStack)
    """Resources closed when preflight is done: prepared data that was not published by then is removed."""

    @property
    def plan(self) -> RunPlan:
        """The job's plan, with the choices made for the model once its structure is known."""
        plan = self.context.plan
        return plan if self.structure is None else plan.with_choices(self.structure.batches)

    @property
    def known_structure(self) -> ModelStructure:
        """The structure, for checks that need `has_structure`."""
        if self.structure is None:
            raise LookupError("the structure is not known")
        return self.structure

    @property
    def known_files(self) -> ModelFiles:
        """The model's files, for checks after check_files."""
        if self.files is None:
            raise LookupError("the model's files were not inspected")
        return self.files

    @property
    def known_added(self) -> AddedTokens:
        """The added tokens, for checks that need `has_added_tokens`."""
        if self.added is None:
            raise LookupError("no token was added")
        return self.added

    @property
    def known_data(self) -> Preparation:
        """The prepared data, for checks after check_data."""
        if self.data is None:
            raise LookupError("the data is not prepared")
        return self.data


def storage_is_ready(seen: JobInspection) -> bool:
    return seen.storage_is_ready


def files_can_be_opened(seen: JobInspection) -> bool:
    """Whether libraries may open the model's directory."""
    return seen.context.base_model.is_dir() and not any(finding.rule == UNUSABLE_FILE for finding in seen.findings)


def files_are_whole(seen: JobInspection) -> bool:
    return seen.files is not None and bool(seen.files.digest)


def expressions_compile(seen: JobInspection) -> bool:
    return seen.expressions_compile


def base_is_made(seen: JobInspection) -> bool:
    """Whether the model to be trained exists: with added tokens it is in another directory than the job names."""
    return seen.added is not None or not seen.plan.model.added_tokens


def has_added_tokens(seen: JobInspection) -> bool:
    return seen.added is not None


def has_tokenizer(seen: JobInspection) -> bool:
    return seen.tokenizer is not None


def has_structure(seen: JobInspection) -> bool:
    return seen.structure is not None


def has_training_data(seen: JobInspection) -> bool:
    return seen.data is not None and TRAIN in seen.data.splits


def trains_input_rows_alone(seen: JobInspection) -> bool:
    return seen.structure is not None and seen.structure.trains_input_rows_alone
