"""What the planner says of our contenders: tokens per second and memory, to stand next to what a device shows."""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu.contender import OURS, SIZES, manifest_of
from bench.memory.__main__ import ASSUMED
from finetune_job.plan.element_types import resolve_elements
from finetune_job.plan.run_plan import RunPlan
from finetune_memory.adapters import trained_parameters
from finetune_memory.devices import device_of
from finetune_memory.estimate import Estimate, estimate
from finetune_memory.families import base_parameters
from finetune_memory.layers import layer_names
from finetune_memory.limit import MemoryLimit
from finetune_memory.model_shape import ModelShape, facts_of
from finetune_memory.pace import calculated_pace
from finetune_memory.sharding import unit_names
from finetune_memory.verdict import workload
from tests.support.tiny_model import GPU_PROFILE, plan_of

STORED, FAMILY = "bfloat16", "llama"


@dataclass(frozen=True)
class Calculated:
    """Of one contender on one kind of device."""

    tokens_per_second: float
    """Of all ranks, with documents as long as rows."""
    step_seconds: float
    peak_memory_bytes: int
    """Of what torch counts as allocated."""
    device_bytes: int
    """With all that a device has to have in addition."""


def calculated(name: str, size: str, ranks: int, device: str) -> Calculated | None:
    """None for other trainers, and for devices whose peaks are not known."""
    if name not in OURS or device_of(device) is None:
        return None
    plan = plan_of(manifest_of(size, 1, ranks, **OURS[name]), GPU_PROFILE)
    shape = _shape(plan, size)
    pace, memory = calculated_pace(plan, shape, STORED, device), _memory(plan, shape)
    allocated = sum(term.bytes for term in memory.terms if term.name not in ASSUMED)
    return Calculated(pace.tokens_per_second, pace.step_seconds, allocated, memory.total)


def _shape(plan: RunPlan, size: str) -> ModelShape:
    config = {"model_type": FAMILY, **SIZES[size]["model"]}
    parameters = trained_parameters(base_parameters(config, STORED), plan.method, STORED, FAMILY)
    return ModelShape(parameters, unit_names(parameters, plan.parallelism.fsdp, layer_names(parameters)), facts_of(config))


def _memory(plan: RunPlan, shape: ModelShape) -> Estimate:
    work = workload(plan, MemoryLimit(0, is_device=True, source=""))
    return estimate(plan, shape, resolve_elements(plan, STORED), work)
