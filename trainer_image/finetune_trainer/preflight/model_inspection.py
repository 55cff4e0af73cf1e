"""The inspection of a model: loaded, observed and with its adapters, as far as known, and the conditions that checks need."""

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
    """The base model on the meta device, and its properties that adapters would hide."""

    base: PreTrainedModel
    vocabulary_size: int
    """Rows of the input embedding."""
    padding_row: int | None
    max_positions: int | None
    max_row: int | None
    """See ModelStructure."""
    wrap_classes: tuple[str, ...]


@dataclass(frozen=True)
class AttachedModel:
    """The model that is trained: with its adapters, or the base model itself."""

    model: nn.Module
    saved_names: dict[str, str]
    """The name in the file of each trained parameter, by its name."""
    units: tuple[str, ...]
    """Names of the modules that become FSDP units."""


@dataclass
class ModelInspection:
    """The inspection of one job's model. A part is None until a check has filled it in, or if that check failed."""

    plan: RunPlan
    directory: Path
    findings: list[Finding] = field(default_factory=list)
    observed: ObservedUse | None = None
    """A small model of the same architecture and how it uses its modules; None if none could be computed."""
    loaded: LoadedModel | None = None
    attached: AttachedModel | None = None
    precision: tuple[Choice, ...] = ()
    """The precision of the computation if the plan left it open; `plan` then holds it as well."""
    attention_problem: str = ""
    """Why attention cannot be computed from document bounds; empty if it can, or if varlen was not considered."""
    conflict: TrainerError | None = None
    """Why no adapters could be attached to the loaded model."""
    structure: ModelStructure | None = None

    @property
    def base(self) -> PreTrainedModel:
        """The base model, for checks that need `is_loaded`."""
        if self.loaded is None:
            raise LookupError("the model is not loaded")
        return self.loaded.base

    @property
    def trained(self) -> AttachedModel:
        """The trained model, for checks that need `is_attached`."""
        if self.attached is None:
            raise LookupError("the adapters are not attached")
        return self.attached

    @property
    def lora(self) -> LoraPlan:
        """LoRA's settings, for checks that need `trains_lora`."""
        if self.plan.method.lora is None:
            raise LookupError("the method has no LoRA settings")
        return self.plan.method.lora

    @property
    def uses(self) -> ModuleUses:
        """The observed uses, for checks that need `is_observed`."""
        if self.observed is None:
            raise LookupError("no small model was observed")
        return self.observed.uses

    @property
    def known_structure(self) -> ModelStructure:
        """The structure, for checks that need `has_structure`."""
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
