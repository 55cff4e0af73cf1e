"""Chooses the element types for loading, computing, reducing and saving, and whether FSDP or autocast casts to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from finetune_job.api.enumerations import Dtype
from finetune_job.plan.element_types import resolve_elements
from finetune_job.plan.run_plan import RunPlan
from finetune_job.sharding import casts
from finetune_trainer.weights.rounding import dtype_name


@dataclass(frozen=True)
class ModelDtypes:
    """Element types of one run."""

    load: torch.dtype
    """The type of base weights in memory."""
    param: torch.dtype | None
    """The type of gathered parameters in forward and backward; None: the type in which ranks hold them."""
    reduce: torch.dtype | None
    """The type of gradients while they are reduced."""
    save: torch.dtype
    """The type of a fully fine-tuned model on disk."""


@dataclass(frozen=True)
class ModelCasts:
    """Types to which FSDP and autocast cast for the computation; None: no cast."""

    by_fsdp: torch.dtype | None
    """The type of the parameters that a unit gathers; with FSDP 2, also of the inputs and outputs of units."""
    by_autocast: torch.dtype | None
    """The type of the operands of products."""


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return the torch type of the same name."""
    return {Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16, Dtype.FLOAT32: torch.float32}[dtype]


def resolve_dtypes(plan: RunPlan, stored: torch.dtype) -> ModelDtypes:
    """Return the types of a run on a base model whose weights are stored as `stored`."""
    elements = resolve_elements(plan, dtype_name(stored))
    return ModelDtypes(
        load=getattr(torch, elements.load),
        param=getattr(torch, elements.param) if elements.param else None,
        reduce=getattr(torch, elements.reduce) if elements.reduce else None,
        save=getattr(torch, elements.save),
    )


def resolve_casts(plan: RunPlan, dtypes: ModelDtypes, world_size: int) -> ModelCasts:
    """Decide whether FSDP or autocast does the cast to `dtypes.param` in a gang of this size."""
    computed = None if dtypes.param is None else dtype_name(dtypes.param)
    chosen = casts(plan.method.type, plan.parallelism.fsdp.version, world_size, computed)
    return ModelCasts(
        by_fsdp=getattr(torch, chosen.by_fsdp) if chosen.by_fsdp else None,
        by_autocast=getattr(torch, chosen.by_autocast) if chosen.by_autocast else None,
    )


def computes_in_float16(plan: RunPlan, dtypes: ModelDtypes) -> bool:
    """Whether a gradient may pass through float16, where small gradients vanish unless the loss is scaled."""
    quantization = plan.method.quantization
    packed = quantization.compute_dtype if quantization else None
    return torch.float16 in (dtypes.load, dtypes.param, dtypes.reduce) or packed is Dtype.FLOAT16
