"""Defines what preflight knows about a model (loaded, observed, with adapters), and runs the checks that read and extend this."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from finetune_job.finding import Finding
from finetune_job.plan.method_plan import LoraPlan
from finetune_job.plan.run_plan import Choice, RunPlan
from finetune_trainer.inspection.module_use import ModuleUses, ObservedUse
from finetune_trainer.inspection.report import ModelStructure
from finetune_trainer.preflight.inspection import is_refused

Part = TypeVar("Part")


@dataclass(frozen=True)
class LoadedModel:
    """The base model on the meta device, and properties of it that adapters would hide."""

    base: PreTrainedModel
    vocabulary_size: int
    """Number of rows of the input embedding."""
    padding_row: int | None
    max_positions: int | None
    max_row: int | None
    """Longest row of a batch, as in ModelStructure."""
    wrap_classes: tuple[str, ...]


@dataclass(frozen=True)
class AttachedModel:
    """The model that is trained: the base with its adapters, or the base itself."""

    model: nn.Module
    saved_names: dict[str, str]
    """Name of each trained parameter -> its name in the saved file."""
    units: tuple[str, ...]
    """Names of the modules that become FSDP units."""


@dataclass
class ModelInspection:
    """The inspection of one job's model. A part is None until a check has filled it in, or if that check failed."""

    plan: RunPlan
    directory: Path
    findings: list[Finding] = field(default_factory=list)
    observed: ObservedUse | None = None
    """A small model of the same architecture and the use of its modules; None if no such model could be run."""
    loaded: LoadedModel | None = None
    attached: AttachedModel | None = None
    precision: tuple[Choice, ...] = ()
    """The choice of the precision, if the plan left it unset. `plan` then also contains the choice."""
    attention_problem: str = ""
    """The reason why attention cannot be computed from document bounds; empty if it can, or if varlen was not considered."""
    structure: ModelStructure | None = None

    @property
    def base(self) -> PreTrainedModel:
        """The base model. Raises MissingPartError."""
        return _required(self.loaded).base

    @property
    def trained(self) -> AttachedModel:
        """The trained model. Raises MissingPartError."""
        return _required(self.attached)

    @property
    def lora(self) -> LoraPlan:
        """LoRA's settings. Raises MissingPartError."""
        return _required(self.plan.method.lora)

    @property
    def uses(self) -> ModuleUses:
        """The observed uses of modules. Raises MissingPartError."""
        return _required(self.observed).uses

    @property
    def known_structure(self) -> ModelStructure:
        """The structure of the trained model. Raises MissingPartError."""
        return _required(self.structure)

    @property
    def is_refused(self) -> bool:
        """Whether a check has reported an error so far."""
        return is_refused(self.findings)

    @property
    def is_sharded(self) -> bool:
        """Whether the model is sharded, because there is more than one rank."""
        return self.plan.parallelism.world_size > 1


class MissingPartError(LookupError):
    """A part of the inspection is missing: the job has none, or no earlier check could fill it in."""


def _required(part: Part | None) -> Part:
    if part is None:
        raise MissingPartError
    return part


Check = Callable[[ModelInspection], Iterable[Finding]]
"""A function that returns findings. Some checks also fill in a part of the inspection that later checks read."""


def run_checks(checks: Iterable[Check], seen: ModelInspection) -> None:
    """Runs the checks in order and adds their findings to `seen.findings`.

    A check that needs a missing part is skipped: if the job should have the part, an earlier finding explains why it is missing.
    """
    for check in checks:
        with suppress(MissingPartError):
            seen.findings += list(check(seen))
