"""What is inspected of a model, as far as it is known: loaded, observed, with its adapters; and what checks may need of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from finetune_job.finding import Finding
from finetune_job.plan.method_plan import LoraPlan
from finetune_job.plan.run_plan import Choice, RunPlan
from finetune_trainer.errors import TrainerError
from finetune_trainer.inspection.module_use import ModuleUses, ObservedUse
from finetune_trainer.inspection.report import ModelStructure


@dataclass(frozen=True)
class LoadedModel:
    """The base model on the meta device, and what adapters would hide of it."""

    base: PreTrainedModel
    vocabulary_size: int
    """Rows of the input embedding."""
    padding_row: int | None
    max_positions: int | None
    max_row: int | None
    """As in ModelStructure."""
    wrap_classes: tuple[str, ...]


@dataclass(frozen=True)
class AttachedModel:
    """The model that is trained: with its adapters, or the base model itself."""

    model: nn.Module
    saved_names: dict[str, str]
    """Name of each trained parameter -> its name in the file."""
    units: tuple[str, ...]
    """Names of the modules that become FSDP units."""


@dataclass
class ModelInspection:
    """Of one job's model. A part is None until a check has filled it in, or if that failed."""

    plan: RunPlan
    directory: Path
    findings: list[Finding] = field(default_factory=list)
    observed: ObservedUse | None = None
    """A small model of the same architecture and how it uses its modules; None if none could be computed."""
    loaded: LoadedModel | None = None
    attached: AttachedModel | None = None
    precision: tuple[Choice, ...] = ()
    """Of the computation, if the plan left it open; it is in `plan` since."""
    attention_problem: str = ""
    """Why attention cannot be computed by the bounds of documents; empty: it can, or nobody has asked."""
    conflict: TrainerError | None = None
    """Why no adapters could be attached to the loaded model."""
    structure: ModelStructure | None = None

    @property
    def base(self) -> PreTrainedModel:
        """Of checks that need `is_loaded`."""
        if self.loaded is None:
            raise LookupError("the model is not loaded")
        return self.loaded.base

    @property
    def trained(self) -> AttachedModel:
        """Of checks that need `is_attached`."""
        if self.attached is None:
            raise LookupError("the adapters are not attached")
        return self.attached

    @property
    def lora(self) -> LoraPlan:
        """Of checks that need `trains_lora`."""
        if self.plan.method.lora is None:
            raise LookupError("the method has no LoRA settings")
        return self.plan.method.lora

    @property
    def uses(self) -> ModuleUses:
        """Of checks that need `is_observed`."""
        if self.observed is None:
            raise LookupError("no small model was observed")
        return self.observed.uses

    @property
    def known_structure(self) -> ModelStructure:
        """Of checks that need `has_structure`."""
        if self.structure is None:
            raise LookupError("the structure is not known")
        return self.structure


def is_observed(seen: ModelInspection) -> bool:
    return seen.observed is not None


def is_loaded(seen: ModelInspection) -> bool:
    return seen.loaded is not None


def is_attached(seen: ModelInspection) -> bool:
    return seen.attached is not None


def has_structure(seen: ModelInspection) -> bool:
    return seen.structure is not None


def trains_lora(seen: ModelInspection) -> bool:
    return seen.plan.method.lora is not None


def has_method_settings(seen: ModelInspection) -> bool:
    return seen.plan.method.adapter is not None


def is_sharded(seen: ModelInspection) -> bool:
    return seen.plan.parallelism.world_size > 1


def is_version_1(seen: ModelInspection) -> bool:
    return seen.plan.parallelism.fsdp.version == 1
