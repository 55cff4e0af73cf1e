"""PURE. Which element type is used where: plan and stored type -> types of loading, computing, reducing and saving."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from finetune_job.api.base import Dtype
from finetune_job.api.method import MethodType
from finetune_job.api.training import Precision
from finetune_job.plan.run_plan import RunPlan


@dataclass(frozen=True)
class ModelDtypes:
    """Element types of one run."""

    load: torch.dtype
    """Base weights in memory."""
    param: torch.dtype | None
    """Gathered parameters in forward and backward; None: as they are held."""
    reduce: torch.dtype | None
    """Gradients while they are reduced."""
    save: torch.dtype
    """A fully fine-tuned model on disk."""


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The torch type of the same name."""
    return {Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16, Dtype.FLOAT32: torch.float32}[dtype]


def resolve_dtypes(plan: RunPlan, stored: torch.dtype) -> ModelDtypes:
    """Types of a run on a base model whose weights are stored as `stored`.

    Trained weights need more bits than their products: updates of 16-bit weights round to nothing. So full fine-tuning holds
    float32 weights and computes in the model's type; adapters see to the same with `autocast_adapter_dtype`.
    """
    save = torch_dtype(plan.model.dtype) if plan.model.dtype else stored
    param = torch_dtype(plan.parallelism.fsdp.param_dtype) if plan.parallelism.fsdp.param_dtype else None
    reduce = torch_dtype(plan.parallelism.fsdp.reduce_dtype) if plan.parallelism.fsdp.reduce_dtype else None
    load = torch.float32 if plan.training.precision is Precision.FP32 else save
    if plan.method.type is MethodType.FULL and load is not torch.float32:
        param, load = param or load, torch.float32
    return ModelDtypes(load=load, param=param, reduce=reduce, save=save)
