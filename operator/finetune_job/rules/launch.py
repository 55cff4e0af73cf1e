"""Rules on ranks, batches, recomputation, storage shared by several nodes, and a profile's requirements and limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from finetune_job.api.job import Rehearsal
from finetune_job.api.method import LoraBias
from finetune_job.api.output import AccessMode
from finetune_job.api.pod_settings import quantity_bytes
from finetune_job.api.training import ActivationCheckpointing, GradientReduction
from finetune_job.plan.resolve_training import world_size
from finetune_job.rules.rule import Problem, RuleContext, format_value, rule

_RECOMPUTE = "training.activationCheckpointing"
_GLOBAL = "training.globalBatchSize"
_MICRO = "training.microBatchSize"
_ACCESS = "workspace.volumeClaimTemplate.accessMode"
_OFFLOAD = "parallelism.fsdp.offloadParams"
_REDUCTION, _METHOD, _VERSION, _LORA = "training.reduction", "method.type", "parallelism.fsdp.version", "method.lora."
_NODES, _PROCESSES, _ELASTIC = "parallelism.nodes", "parallelism.processesPerNode", "parallelism.elastic"
PACKED_BITS, ORDERED_FSDP = 4, 2
LARGEST_GLOBAL_BATCH = 1_000_000
"""Maximum of `globalBatchSize` in the schema."""


@rule("compile-with-selective-checkpointing")
def compile_with_selective_checkpointing(context: RuleContext) -> Problem | None:
    training = context.spec.training
    if not training.compile or training.activation_checkpointing is not ActivationCheckpointing.SELECTIVE:
        return None
    return Problem(value=training.activation_checkpointing, field=_RECOMPUTE)


@rule("global-batch-not-divisible")
def global_batch_not_divisible(context: RuleContext) -> Problem | None:
    training, ranks = context.spec.training, world_size(context.spec)
    unit = ranks * (training.micro_batch_size or 1)
    if training.global_batch_size is None or training.global_batch_size % unit == 0:
        return None
    changes: dict[str, Any] = {}
    if unit > LARGEST_GLOBAL_BATCH:
        changes[_MICRO] = None
        unit = ranks
    above = math.ceil(training.global_batch_size / unit) * unit
    changes[_GLOBAL] = above if above <= LARGEST_GLOBAL_BATCH else above - unit
    micro = f" with a microBatchSize of {training.micro_batch_size}" if training.micro_batch_size else ""
    return Problem(
        value=training.global_batch_size,
        message=f"{training.global_batch_size} sequences do not split evenly over {ranks} rank{'s' if ranks > 1 else ''}{micro}",
        fix=f"set {_GLOBAL} to {changes[_GLOBAL]}, a multiple of {unit}"
        + (f", and remove {_MICRO}" if _MICRO in changes else ""),
        changes=changes,
    )


@rule("nodes-need-read-write-many")
def nodes_need_read_write_many(context: RuleContext) -> Problem | None:
    template, nodes = context.spec.workspace.volume_claim_template, context.spec.parallelism.nodes
    if template is None or nodes == 1 or template.access_mode is AccessMode.READ_WRITE_MANY:
        return None
    return Problem(
        value=template.access_mode,
        message=f"{nodes} nodes share one workspace, and a {template.access_mode} claim is mounted by one node at a time",
        fix=f"set {_ACCESS} to ReadWriteMany (its storage class must offer that), or parallelism.nodes to 1",
        field=_ACCESS,
        changes={_ACCESS: AccessMode.READ_WRITE_MANY},
    )


@rule("offload-without-gpu")
def offload_without_gpu(context: RuleContext) -> Problem | None:
    if not context.spec.parallelism.fsdp.offload_params or context.profile is None or context.profile.gpu is not None:
        return None
    return Problem(value=True)


@rule("ordered-reduction-not-possible")
def ordered_reduction_not_possible(context: RuleContext) -> Problem | None:
    if context.spec.training.reduction is not GradientReduction.ORDERED:
        return None
    reason = next(against_order(context), None)
    if reason is None:
        return None
    # Elastic gangs need ordered reduction, so if that is removed, the elastic setting has to be removed too.
    fields = [_REDUCTION] if context.spec.parallelism.elastic is None else [_REDUCTION, _ELASTIC]
    return Problem(
        value=GradientReduction.ORDERED,
        message=f"{reason}; gradients are added up in order only for what every rank can keep whole: the factors of LoRA, QLoRA, "
        "DoRA and QDoRA, under FSDP 2",
        fix=f"remove {' and '.join(fields)}",
        changes=dict.fromkeys(fields),
    )


def against_order(context: RuleContext) -> Iterator[str]:
    """Yield the reasons why a job's gradients cannot be summed in a fixed order."""
    method, lora, fsdp = context.plan.method, context.plan.method.lora, context.plan.parallelism.fsdp
    if lora is None:
        yield f"{_METHOD} is {method.type}"
        return
    if lora.bias is not LoraBias.NONE:
        yield f"{_LORA}bias trains parts of the base"
    if lora.modules_to_save:
        yield f"{_LORA}modulesToSave trains parts of the base"
    if lora.trainable_token_indices:
        yield f"{_LORA}trainableTokenIndices trains parts of the base"
    if lora.target_parameters:
        yield f"{_LORA}targetParameters computes the adapted parameters again in each pass"
    if method.quantization is not None and method.quantization.bits != PACKED_BITS:
        yield f"method.quantization.bits is {method.quantization.bits}"
    if context.plan.parallelism.world_size > 1 and fsdp.version != ORDERED_FSDP:
        yield f"{_VERSION} is {fsdp.version}"
    if fsdp.offload_params:
        yield f"{_OFFLOAD} is true"


@rule("rehearsal-required")
def rehearsal_required(context: RuleContext) -> Problem | None:
    profile = context.profile
    if context.spec.preflight.rehearsal is Rehearsal.RUN or profile is None or not profile.require_rehearsal:
        return None
    return Problem(value=context.spec.preflight.rehearsal)


@rule("profile-limit-exceeded")
def profile_limit_exceeded(context: RuleContext) -> Problem | None:
    """Report the first limit of the profile that the job exceeds."""
    if context.profile is None:
        return None
    limits, run, ranks = context.profile.limits, context.spec.run, context.spec.parallelism
    template = context.spec.workspace.volume_claim_template
    if limits.nodes is not None and ranks.nodes > limits.nodes:
        return _over("nodes", _NODES, ranks.nodes, limits.nodes, {_NODES: limits.nodes})
    if context.profile.gpu is not None and limits.gpus is not None and world_size(context.spec) > limits.gpus:
        nodes = limits.gpus // ranks.processes_per_node
        fewer = {_NODES: nodes} if nodes else {_NODES: 1, _PROCESSES: limits.gpus}
        asked = f"{world_size(context.spec)} (nodes {ranks.nodes} x processesPerNode {ranks.processes_per_node})"
        return _over("gpus", _NODES, ranks.nodes, limits.gpus, fewer, asked=asked)
    if limits.storage is not None and template is not None and quantity_bytes(template.storage) > quantity_bytes(limits.storage):
        path = "workspace.volumeClaimTemplate.storage"
        return _over("storage", path, template.storage, limits.storage, {path: limits.storage})
    longest = limits.active_deadline_seconds
    if longest is not None and (run.active_deadline_seconds is None or run.active_deadline_seconds > longest):
        path = "run.activeDeadlineSeconds"
        return _over("activeDeadlineSeconds", path, run.active_deadline_seconds, longest, {path: longest})
    if limits.max_restarts is not None and run.max_restarts > limits.max_restarts:
        path = "run.maxRestarts"
        return _over("maxRestarts", path, run.max_restarts, limits.max_restarts, {path: limits.max_restarts})
    return None


def _over(limit: str, field: str, value: Any, most: Any, changes: dict[str, Any], *, asked: str = "") -> Problem:
    written = ", ".join(f"{path}: {new}" for path, new in changes.items())
    return Problem(
        field=field,
        value=value,
        message=f"limits.{limit} of the profile: at most {most}; the job requests {asked or format_value(value)}",
        fix=f"set {written}, or use a profile that allows more",
        changes=changes,
    )
