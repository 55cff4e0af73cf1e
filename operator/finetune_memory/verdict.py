"""Judges whether a job fits: the memory that a rank may take, the estimate against that limit, and the finding."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.api.inputs import Attention
from finetune_job.api.pod_settings import quantity_bytes
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.plan.element_types import resolve_elements
from finetune_job.plan.launch_plan import Placement
from finetune_job.plan.run_plan import Choice, RunPlan
from finetune_memory.alternatives import MAX_RANKS_FACTOR, Alternative, Site, cheapest_fitting, demand_on_cluster, leanest
from finetune_memory.choices import (
    Predict,
    choose_attention,
    choose_batches,
    choose_precision,
    choose_resharding,
    trains_on_gpu,
    varlen_problem,
)
from finetune_memory.estimate import Estimate, estimate
from finetune_memory.layers import read_layers
from finetune_memory.limit import MemoryLimit, format_bytes
from finetune_memory.model_shape import LENGTH_MULTIPLE, ModelShape, Workload

GPU_FINDING = "memory-estimate-exceeds-gpu"
POD_FINDING = "memory-estimate-exceeds-pod"


def limit_of(plan: RunPlan) -> MemoryLimit | None:
    """Return the memory that a rank may take according to the plan's placement; None if it is unknown, as in local mode."""
    placement = plan.placement
    if placement is None:
        return None
    if placement.gpu_memory is not None:
        source = f"gpu.memory of profile {placement.profile}"
        return MemoryLimit(quantity_bytes(placement.gpu_memory), is_device=True, source=source)
    if placement.gpu_resource_name is not None:
        return None  # the plan is from a release that did not record a device's memory
    return _share_of_the_pod(plan, placement)


def host_limit_of(plan: RunPlan) -> MemoryLimit | None:
    """Return a rank's share of the pod's memory if the rank also has a device; None if it has none, or the limit is unknown."""
    placement = plan.placement
    if placement is None or placement.gpu_memory is None:
        return None
    return _share_of_the_pod(plan, placement)


def _share_of_the_pod(plan: RunPlan, placement: Placement) -> MemoryLimit:
    share = quantity_bytes(placement.resources.train.memory) // plan.parallelism.processes_per_node
    return MemoryLimit(share, is_device=False, source=f"a rank's share of resources.train.memory of profile {placement.profile}")


@dataclass(frozen=True)
class MemoryVerdict:
    """The verdict on a job's memory."""

    plan: RunPlan
    """The plan with all choices."""
    estimate: Estimate
    limit: MemoryLimit | None
    alternative: Alternative | None
    """The cheapest change that helps, if the estimate is above the limit."""
    host_limit: MemoryLimit | None = None
    """Limit of host memory if a rank also has a device."""
    leanest: Alternative | None = None
    """The combination of all changes that save memory, if no combination makes the job fit."""
    resharding: Choice | None = None
    """The choice whether ranks free gathered parameters after the forward pass, if the plan leaves it unset."""
    batches: tuple[Choice, ...] = ()
    """The choices of precision, attention, micro-batch and recomputation, as far as the plan leaves them unset."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All values that the planner chose."""
        return (*self.batches, *(() if self.resharding is None else (self.resharding,)))

    @property
    def fits(self) -> bool:
        """Whether the job fits; true if no limit is known."""
        return self.limit is None or self.estimate.total <= self.limit.bytes

    @property
    def exceeds_host(self) -> bool:
        """Whether a pod with devices has too little memory of its own."""
        return self.host_limit is not None and self.estimate.host_total > self.host_limit.bytes


def predictor(shape: ModelShape, stored: str, limit: MemoryLimit | None, *, longest: int | None = None) -> Predict:
    """Return a function that estimates the memory of this model for a plan. The arguments are those of `judge_memory`."""
    layers = read_layers(shape)
    return lambda plan: estimate(plan, shape, resolve_elements(plan, stored), workload(plan, limit, longest), layers)


def judge_memory(
    plan: RunPlan, shape: ModelShape, stored: str, limit: MemoryLimit | None, *, longest: int | None = None
) -> MemoryVerdict:
    """Choose the settings that the plan leaves unset, and compare the estimate with the limit.

    stored: element type of the base model's files. longest: tokens of the longest record; None for the longest allowed.
    """
    predict = predictor(shape, stored, limit, longest=longest)
    kernels = (*choose_precision(plan, stored), *choose_attention(plan, varlen_problem(plan, shape.facts, stored)))
    plan = plan.with_choices(kernels)
    batches = (*kernels, *choose_batches(plan, limit, predict))
    plan = plan.with_choices(batches)
    resharding = choose_resharding(plan, limit, predict)
    if resharding is not None:
        plan = plan.with_fsdp(reshard_after_forward=resharding.value)
    prediction = predict(plan)
    host_limit = host_limit_of(plan) if limit is not None and limit.is_device else None
    if limit is None or prediction.total <= limit.bytes:
        return MemoryVerdict(plan, prediction, limit, None, host_limit, resharding=resharding, batches=batches)
    site = Site(has_gpus=limit.is_device, most_ranks=limit.devices)
    # Changes that barely fit are proposed if no others leave room for the estimate's error, or only ones with more nodes.
    ways = [way for most in (limit.roomy, limit.bytes) if (way := cheapest_fitting(plan, most, predict, site)) is not None]
    alternative = min(ways, key=lambda way: any(change.field == "spec.parallelism.nodes" for change in way.changes), default=None)
    least = None if alternative is not None else leanest(plan, predict, site)
    return MemoryVerdict(plan, prediction, limit, alternative, host_limit, least, resharding, batches)


def workload(plan: RunPlan, limit: MemoryLimit | None, longest: int | None = None) -> Workload:
    """Return the largest batch of a job. Rows hold several documents or are padded, so all attention but varlen needs a mask."""
    length = plan.data.max_sequence_length
    if longest is not None and not plan.data.packing:
        length = min(length, longest)
    return Workload(
        rows=plan.training.micro_batch_size,
        length=-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE,
        has_mask=plan.model.attention is not Attention.VARLEN,
        on_gpu=limit.is_device if limit is not None else trains_on_gpu(plan),
    )


def no_change_suffices(verdict: MemoryVerdict) -> str:
    """Say in words why no change suffices, and what would help."""
    least = verdict.leanest or Alternative((), verdict.estimate)
    on_one_machine = verdict.limit is not None and verdict.limit.devices is not None
    tried_on = "on this machine" if on_one_machine else f"up to {MAX_RANKS_FACTOR} times the ranks"
    most, total = least.estimate.largest[0], format_bytes(least.estimate.total)
    tried = (
        f"even with {least.text} a rank needs {total}" if least.changes else f"no setting saves memory, and a rank needs {total}"
    )
    return (
        f"no change suffices, {tried_on}: {tried}, most of it {most.name} ({format_bytes(most.bytes)}: {most.detail}); "
        f"it fits with that on devices of {total}; else take a smaller model"
    )


def memory_finding(verdict: MemoryVerdict) -> Finding | None:
    """Return an error if a device would run out of memory, a warning if a pod would; None if the job fits."""
    limit = verdict.limit
    if limit is None or verdict.fits:
        return _host_finding(verdict)
    largest = ", ".join(f"{term.name} {format_bytes(term.bytes)}" for term in verdict.estimate.largest[:3])
    alternative = verdict.alternative
    needed = (
        f"a rank needs about {format_bytes(verdict.estimate.total)} of {format_bytes(limit.bytes)} ({limit.source}); "
        f"largest: {largest}"
    )
    fix = (
        f"set {alternative.text}, which needs {format_bytes(alternative.estimate.total)}"
        f"{demand_on_cluster(verdict.plan, alternative) if limit.devices is None else ''}"
        if alternative is not None
        else no_change_suffices(verdict)
    )
    return make_finding(
        GPU_FINDING if limit.is_device else POD_FINDING,
        field=alternative.changes[0].field if alternative is not None else "spec.training.microBatchSize",
        value=format_bytes(verdict.estimate.total),
        message=needed,
        fix=fix,
        changes={change.field: change.value for change in alternative.changes} if alternative is not None else None,
    )


def _host_finding(verdict: MemoryVerdict) -> Finding | None:
    """Return a warning if devices suffice and the pod's own memory does not: the kernel would then kill a rank."""
    limit = verdict.host_limit
    if limit is None or not verdict.exceeds_host:
        return None
    need = verdict.estimate.host_total
    largest = max(verdict.estimate.host_terms, key=lambda term: term.bytes)
    return make_finding(
        POD_FINDING,
        field="spec.profile",
        value=format_bytes(need),
        message=f"a rank needs about {format_bytes(need)} of host memory of {format_bytes(limit.bytes)} ({limit.source}); "
        f"largest: {largest.name} {format_bytes(largest.bytes)}, {largest.detail}",
        fix=f"raise resources.train.memory of the profile to {format_bytes(need)} for each of processesPerNode, or lower "
        "processesPerNode",
    )
