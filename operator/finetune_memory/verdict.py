"""A job's estimate against what its ranks may take, with the change that would make it fit."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.catalogue.book import make_finding
from finetune_job.plan.element_types import resolve_elements
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.rule import Finding
from finetune_memory.activations import read_layers
from finetune_memory.alternatives import Alternative, largest_fitting, leanest
from finetune_memory.estimate import Estimate, estimate
from finetune_memory.limits import Limit, host_limit_of, shown
from finetune_memory.model_shape import ModelShape
from finetune_memory.workload import LENGTH_MULTIPLE, Workload

RULE = "memory-estimate-exceeds-gpu"
HOST_RULE = "memory-estimate-exceeds-pod"


@dataclass(frozen=True)
class MemoryVerdict:
    """What is to say about a job's memory."""

    estimate: Estimate
    limit: Limit | None
    alternative: Alternative | None
    """Where the estimate is above the limit and some change helps."""
    host_limit: Limit | None = None
    """Of host memory, beside a device."""
    leanest: Estimate | None = None
    """Where no change helps: with all of them."""

    @property
    def fits(self) -> bool:
        """Whether it does, as far as anybody has said how much there is."""
        return self.limit is None or self.estimate.total <= self.limit.bytes

    @property
    def exceeds_host(self) -> bool:
        """Whether a pod with devices has too little memory of its own."""
        return self.host_limit is not None and self.estimate.host_total > self.host_limit.bytes


def judge_memory(
    plan: RunPlan, shape: ModelShape, stored: str, limit: Limit | None, *, longest: int | None = None
) -> MemoryVerdict:
    """`stored`: element type of the base model's files. `longest`: tokens of the longest record; None: as many as are allowed."""
    layers = read_layers(shape)

    def predict(changed: RunPlan) -> Estimate:
        return estimate(changed, shape, resolve_elements(changed, stored), workload(changed, limit, longest), layers)

    found = predict(plan)
    host_limit = host_limit_of(plan) if limit is not None and limit.is_device else None
    if limit is None or found.total <= limit.bytes:
        return MemoryVerdict(found, limit, None, host_limit)
    alternative = largest_fitting(plan, limit.bytes, predict)
    return MemoryVerdict(found, limit, alternative, host_limit, None if alternative is not None else leanest(plan, predict))


def no_change_helps(least: Estimate) -> str:
    """Why not, in words."""
    most = least.largest[0]
    return (
        "no change of micro-batch, checkpointing, ranks or sequence length suffices: with all of them a rank still needs "
        f"{shown(least.total)}, most of it {most.name} ({shown(most.bytes)}: {most.detail})"
    )


def workload(plan: RunPlan, limit: Limit | None, longest: int | None = None) -> Workload:
    """The largest batch of a job. Its rows hold several documents, or are padded, and either takes a mask."""
    length = plan.data.max_sequence_length
    if longest is not None and not plan.data.packing:
        length = min(length, longest)
    on_gpu = limit.is_device if limit is not None else plan.placement is not None and plan.placement.gpu_resource_name is not None
    return Workload(
        rows=plan.training.micro_batch_size, length=-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, has_mask=True, on_gpu=on_gpu
    )


def finding_of(verdict: MemoryVerdict) -> Finding | None:
    """An error where a device would run out of memory, a warning where a pod would; None where the job fits."""
    limit = verdict.limit
    if limit is None or verdict.fits:
        return _host_finding(verdict)
    largest = ", ".join(f"{term.name} {shown(term.bytes)}" for term in verdict.estimate.largest[:3])
    alternative = verdict.alternative
    needed = f"a rank needs about {shown(verdict.estimate.total)} of {shown(limit.bytes)} ({limit.source}); largest: {largest}"
    fix = (
        f"set {alternative.text}, which needs {shown(alternative.estimate.total)}"
        if alternative is not None
        else f"{no_change_helps(verdict.leanest or verdict.estimate)}; take larger devices or a smaller model"
    )
    return make_finding(
        RULE if limit.is_device else HOST_RULE,
        field=verdict_field(verdict),
        value=shown(verdict.estimate.total),
        message=needed,
        fix=fix,
        changes={change.field: change.value for change in alternative.changes} if alternative is not None else None,
    )


def _host_finding(verdict: MemoryVerdict) -> Finding | None:
    """A warning where devices suffice and the pod's own memory does not: the kernel then ends a rank."""
    limit = verdict.host_limit
    if limit is None or not verdict.exceeds_host:
        return None
    need = verdict.estimate.host_total
    largest = max(verdict.estimate.host_terms, key=lambda term: term.bytes)
    return make_finding(
        HOST_RULE,
        field="spec.profile",
        value=shown(need),
        message=f"a rank needs about {shown(need)} of host memory of {shown(limit.bytes)} ({limit.source}); "
        f"largest: {largest.name} {shown(largest.bytes)}, {largest.detail}",
        fix=f"raise resources.train.memory of the profile to {shown(need)} for each of processesPerNode, or lower processesPerNode",
    )


def verdict_field(verdict: MemoryVerdict) -> str:
    """The field that the first change is about."""
    return verdict.alternative.changes[0].field if verdict.alternative is not None else "spec.training.microBatchSize"
