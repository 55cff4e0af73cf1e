"""Gives the memory planner the model's real structure and this machine's limits, and returns its estimate and choices.

meta_model.py and job_steps.py call this. This module does not import torch, which the process that prepares data must not do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune_job.finding import Finding
from finetune_job.plan.run_plan import Choice, RunPlan
from finetune_memory.choices import choose_attention, choose_batches
from finetune_memory.limit import MemoryLimit
from finetune_memory.model_shape import Kind, ModelShape, ParameterShape, UnknownModelError, facts_of
from finetune_memory.this_machine import gpu_mebibytes
from finetune_memory.verdict import judge_memory, limit_of, memory_finding, predictor
from finetune_trainer.data.prepare import SplitFacts
from finetune_trainer.inspection.report import ModelStructure

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that training needs in this job."""

    estimate: int
    """Number of bytes needed by the rank that needs the most."""
    limit: int | None
    """Number of bytes that a rank may use; None if no limit is known."""
    terms: Mapping[str, int]
    """Name of each part of the estimate -> bytes."""
    finding: Finding | None
    resharding: Choice | None = None
    """The choice of `reshardAfterForward` if the plan leaves it unset."""

    @property
    def facts(self) -> dict[str, str]:
        """The numbers that the termination report shows."""
        numbers = {"memory_estimate": str(self.estimate)}
        return numbers if self.limit is None else {**numbers, "memory_limit": str(self.limit)}


def shape_of(model: nn.Module, base: PreTrainedModel, units: Collection[str], load: str) -> ModelShape | None:
    """Describes `model`, which is `base` with its adapters. Returns None if the planner does not know its configuration.

    Weights that are already packed are given with their shape and type before packing: the planner computes the packing itself.
    """
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping

    from finetune_trainer.model.invariants import SAVED_WHOLE
    from finetune_trainer.model.load_shards import keeps_some_in_float32
    from finetune_trainer.objective.head import returns_output_of_head
    from finetune_trainer.weights.rounding import dtype_name

    try:
        facts = facts_of(
            # This includes transformers' defaults, which a published config.json may leave out (Gemma 3's does).
            base.config.to_dict(),
            has_whole_logits=not returns_output_of_head(base),
            has_fused_attention=bool(getattr(base, "_supports_sdpa", False)),
            is_stored_otherwise=bool(get_model_conversion_mapping(base, add_legacy=False))
            or keeps_some_in_float32(base, getattr(torch, load)),
        )
    except UnknownModelError:
        return None
    modules = dict(model.named_modules())
    parameters = []
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        # The layers of an adapter are also torch layers, but do not belong to the model.
        is_added = parameter.requires_grad and model is not base and SAVED_WHOLE not in owner.split(".")
        kind = _kind(modules[owner]) if last == "weight" and not is_added else "other"
        shape, dtype = tuple(parameter.shape), dtype_name(parameter.dtype)
        if kind == "linear" and not parameter.requires_grad:
            shape, dtype = (int(modules[owner].out_features), int(modules[owner].in_features)), load
        parameters.append(ParameterShape(name, shape, dtype, is_trained=parameter.requires_grad, kind=kind))
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return ModelShape(tuple(parameters), tuple(units), facts, buffers)


def _kind(module: nn.Module) -> Kind:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, Conv1D):
        return "transposed"
    return "embedding" if isinstance(module, nn.Embedding) else "other"


def batches_of(
    plan: RunPlan, shape: ModelShape | None, stored: str, *, can_recompute: bool, attention_problem: str
) -> tuple[Choice, ...]:
    """Returns what the planner chooses for settings that the plan leaves unset, for records of any length.

    The choices are the same for every attempt and for any data. attention_problem: why varlen is not possible; empty if it is.
    """
    attention = choose_attention(plan, attention_problem)
    plan = plan.with_choices(attention)
    limit = limit_here(plan)
    predict = None if shape is None else predictor(shape, stored, limit)
    return (*attention, *choose_batches(plan, limit, predict, can_recompute=can_recompute))


def memory_need(plan: RunPlan, structure: ModelStructure, splits: Mapping[str, SplitFacts]) -> MemoryNeed | None:
    """Returns the planner's verdict; None if the planner does not know the model."""
    if structure.shape is None:
        return None
    longest = max((facts.longest_document for facts in splits.values()), default=0)
    limit = limit_here(plan)
    verdict = judge_memory(plan, structure.shape, structure.stored_dtype, limit, longest=longest or None)
    return MemoryNeed(
        estimate=verdict.estimate.total,
        limit=None if limit is None else limit.bytes,
        terms={term.name: term.bytes for term in verdict.estimate.terms},
        finding=memory_finding(verdict),
        resharding=verdict.resharding,
    )


def limit_here(plan: RunPlan) -> MemoryLimit | None:
    """Returns the limit of the plan's placement, or else of this machine's smallest visible GPU; None if neither is known."""
    limit = limit_of(plan)
    if limit is not None or plan.placement is not None:
        return limit
    sizes = gpu_mebibytes()
    if not sizes:
        return None
    return MemoryLimit(min(sizes) * 2**20, is_device=True, source="the smallest GPU of this machine", devices=len(sizes))
