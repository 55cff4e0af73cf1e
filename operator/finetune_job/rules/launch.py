"""Ranks, batches, recomputation, the storage that several nodes share, and what a profile requires and limits."""

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
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, format_value, rule

_RECOMPUTE = "training.activationCheckpointing"
_COMPILE = "training.compile"
_GLOBAL = "training.globalBatchSize"
_MICRO = "training.microBatchSize"
_ACCESS = "workspace.volumeClaimTemplate.accessMode"
_OFFLOAD = "parallelism.fsdp.offloadParams"
_REDUCTION, _METHOD, _VERSION, _LORA = "training.reduction", "method.type", "parallelism.fsdp.version", "method.lora."
_REHEARSAL = "preflight.rehearsal"
_NODES, _PROCESSES, _ELASTIC = "parallelism.nodes", "parallelism.processesPerNode", "parallelism.elastic"
ORDER_DEPENDS_ON = (
    _METHOD,
    _VERSION,
    _OFFLOAD,
    *(_LORA + name for name in ("bias", "modulesToSave", "targetParameters", "trainableTokenIndices")),
    "method.quantization.bits",
    _NODES,
    _PROCESSES,
)
"""What `against_order` looks at."""
PACKED_BITS, ORDERED_FSDP = 4, 2
LARGEST_GLOBAL_BATCH = 1_000_000
"""The limit of the field itself."""


@rule(
    "compile-with-selective-checkpointing",
    "A compiled layer hides its matrix products",
    reads=(_COMPILE, _RECOMPUTE),
    sources=(
        "torch: torch/utils/checkpoint.py, create_selective_checkpoint_contexts (it sees operations as they are dispatched)",
    ),
    reproduction=Reproduction(
        "tests/pitfalls/test_activation_checkpointing.py::test_selective_recomputation_keeps_all_of_a_compiled_layer",
        "no error: as much is kept for the backward pass as without recomputation",
    ),
    holds_for="torch >= 2.4",
)
def compile_with_selective_checkpointing(context: RuleContext) -> Problem | None:
    training = context.spec.training
    if not training.compile or training.activation_checkpointing is not ActivationCheckpointing.SELECTIVE:
        return None
    return Problem(
        field=_RECOMPUTE,
        value=training.activation_checkpointing,
        message="layers are compiled whole, and inside one nothing tells a matrix product from what is cheap again: all would be "
        "kept, as without recomputation",
        fix=f"set {_RECOMPUTE} to Full, or {_COMPILE} to false",
        changes={_RECOMPUTE: ActivationCheckpointing.FULL},
    )


@rule(
    "global-batch-not-divisible",
    "The global batch must split evenly over ranks and micro-batches",
    reads=(_GLOBAL, _MICRO, "parallelism.nodes", "parallelism.processesPerNode"),
    sources=("globalBatchSize = microBatchSize x ranks x accumulation steps",),
    reproduction=Reproduction(
        "tests/pitfalls/test_schedules.py::test_a_batch_that_does_not_split_loses_sequences",
        "no error: the sequences that are left over are in no rank's part, step after step",
    ),
    holds_for=OURS,
)
def global_batch_not_divisible(context: RuleContext) -> Problem | None:
    training, ranks = context.spec.training, world_size(context.spec)
    unit = ranks * (training.micro_batch_size or 1)
    if training.global_batch_size % unit == 0:
        return None
    changes: dict[str, Any] = {}
    if unit > LARGEST_GLOBAL_BATCH:
        changes[_MICRO] = None
        unit = ranks
    above = math.ceil(training.global_batch_size / unit) * unit
    changes[_GLOBAL] = above if above <= LARGEST_GLOBAL_BATCH else above - unit
    micro = f" with a microBatchSize of {training.micro_batch_size}" if training.micro_batch_size else ""
    return Problem(
        field=_GLOBAL,
        value=training.global_batch_size,
        message=f"{training.global_batch_size} sequences do not split evenly over {ranks} rank{'s' if ranks > 1 else ''}{micro}",
        fix=f"set {_GLOBAL} to {changes[_GLOBAL]}, a multiple of {unit}"
        + (f", and remove {_MICRO}" if _MICRO in changes else ""),
        changes=changes,
    )


@rule(
    "nodes-need-read-write-many",
    "Several nodes need a workspace that all of them can mount",
    reads=("parallelism.nodes", _ACCESS),
    sources=("Kubernetes: a ReadWriteOnce volume is mounted by one node at a time",),
    holds_for="every version",
    not_reproduced="the failure needs two nodes and a volume that only one of them can mount, and the tests have one node",
)
def nodes_need_read_write_many(context: RuleContext) -> Problem | None:
    template, nodes = context.spec.workspace.volume_claim_template, context.spec.parallelism.nodes
    if template is None or nodes == 1 or template.access_mode is AccessMode.READ_WRITE_MANY:
        return None
    return Problem(
        field=_ACCESS,
        value=template.access_mode,
        message=f"{nodes} nodes share one workspace, and a {template.access_mode} claim is mounted by one node at a time",
        fix=f"set {_ACCESS} to ReadWriteMany (its storage class must offer that), or parallelism.nodes to 1",
        changes={_ACCESS: AccessMode.READ_WRITE_MANY},
    )


@rule(
    "offload-without-gpu",
    "Offloading parameters needs a GPU to offload them from",
    reads=(_OFFLOAD,),
    sources=("torch: offloaded parameters are in pinned memory, which only a GPU driver can give",),
    reproduction=Reproduction(
        "tests/pitfalls/test_offload.py::test_offloading_needs_a_driver", "RuntimeError: pinned memory needs an accelerator"
    ),
    holds_for="torch >= 2.0, both FSDP versions",
)
def offload_without_gpu(context: RuleContext) -> Problem | None:
    if not context.spec.parallelism.fsdp.offload_params or context.profile is None or context.profile.gpu is not None:
        return None
    return Problem(
        field=_OFFLOAD,
        value=True,
        message="the profile has no GPU: parameters are in the CPU's memory anyway, and pinning them fails without a driver",
        fix=f"remove {_OFFLOAD}, or use a profile with GPUs",
        changes={_OFFLOAD: None},
    )


@rule(
    "ordered-reduction-not-possible",
    "Gradients are added up in order for low-rank adapters under FSDP 2",
    reads=(_REDUCTION, *ORDER_DEPENDS_ON, _ELASTIC),
    sources=("every rank keeps all that is trained, and a gradient of it for each virtual rank",),
    holds_for=OURS,
    not_reproduced="no library fails: adding up in order is this trainer's own",
)
def ordered_reduction_not_possible(context: RuleContext) -> Problem | None:
    if context.spec.training.reduction is not GradientReduction.ORDERED:
        return None
    reason = next(against_order(context), None)
    if reason is None:
        return None
    # An elastic gang asks for the order.
    fields = [_REDUCTION] if context.spec.parallelism.elastic is None else [_REDUCTION, _ELASTIC]
    return Problem(
        field=_REDUCTION,
        value=GradientReduction.ORDERED,
        message=f"{reason}; gradients are added up in order only for what every rank can keep whole: the factors of LoRA, QLoRA, "
        "DoRA and QDoRA, under FSDP 2",
        fix=f"remove {' and '.join(fields)}",
        changes=dict.fromkeys(fields),
    )


def against_order(context: RuleContext) -> Iterator[str]:
    """Why the gradients of a job cannot be added up in order."""
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


@rule(
    "rehearsal-required",
    "The profile lets a job train only after a rehearsal",
    reads=(_REHEARSAL,),
    sources=("this product's FineTuneProfile",),
    holds_for=OURS,
    in_preflight="a rehearsal that could not be done to its end",
    not_reproduced="no library fails: what the profile allows is up to administrators",
)
def rehearsal_required(context: RuleContext) -> Problem | None:
    profile = context.profile
    if context.spec.preflight.rehearsal is Rehearsal.RUN or profile is None or not profile.require_rehearsal:
        return None
    return Problem(
        field=_REHEARSAL,
        value=context.spec.preflight.rehearsal,
        message="requireRehearsal of the profile: a job trains only after a rehearsal that passed",
        fix=f"remove {_REHEARSAL}, or ask for a profile that does not require it",
        changes={_REHEARSAL: None},
    )


@rule(
    "profile-limit-exceeded",
    "The profile limits what one job may ask for",
    reads=(_NODES, _PROCESSES, "workspace.volumeClaimTemplate.storage", "run.activeDeadlineSeconds", "run.maxRestarts"),
    sources=("this product's FineTuneProfile",),
    holds_for=OURS,
    not_reproduced="no library fails: what the profile allows is up to administrators",
)
def profile_limit_exceeded(context: RuleContext) -> Problem | None:
    """The first limit that is exceeded."""
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
        message=f"limits.{limit} of the profile: at most {most}; the job asks for {asked or format_value(value)}",
        fix=f"set {written}, or ask for a profile that allows more",
        changes=changes,
    )


RULES = (
    global_batch_not_divisible,
    nodes_need_read_write_many,
    offload_without_gpu,
    compile_with_selective_checkpointing,
    ordered_reduction_not_possible,
    rehearsal_required,
    profile_limit_exceeded,
)
