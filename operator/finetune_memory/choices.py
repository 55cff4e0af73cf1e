"""Makes the choices that a plan leaves open: precision, attention, micro-batch, recomputation, and gathered weights.

These choices alter only speed and memory. Memory is used for speed as long as a part of the limit stays free, because an estimate
may be wrong. If no setting leaves that part free, the setting that needs the least memory is chosen: a job is never refused
because of a setting that the user left unset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from finetune_job.api.enumerations import Dtype
from finetune_job.api.inputs import Attention
from finetune_job.api.method import QuantStorage
from finetune_job.api.training import ActivationCheckpointing, Precision
from finetune_job.plan.element_types import resolve_elements
from finetune_job.plan.resolve_training import micro_batch_sizes
from finetune_job.plan.run_plan import (
    ATTENTION_FIELD,
    MICRO_BATCH_FIELD,
    PRECISION_FIELD,
    RECOMPUTATION_FIELD,
    RESHARDING_FIELD,
    Choice,
    RunPlan,
)
from finetune_memory.estimate import Estimate
from finetune_memory.limit import KEPT_FREE_PERCENT, MemoryLimit, format_bytes
from finetune_memory.model_shape import ArchitectureFacts

LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
"""Largest size of a head that flash attention accepts, and the number of which the size must be a multiple."""
NOT_FUSED = "transformers has no fused attention for this architecture"
UNKNOWN = "the memory planner does not know this model"
Predict = Callable[[RunPlan], Estimate]


def choose_precision(plan: RunPlan, stored: str) -> tuple[Choice, ...]:
    """Choose the precision if the plan leaves it unset. stored: element type of the base model's files.

    The choice is the base's type, also for adapters: a 16-bit base computes in its own type, and only the model's files
    show that type. PEFT holds adapters in float32 and would also multiply them in float32, unless the whole job computes in
    the base's type.
    """
    if not plan.leaves_open(PRECISION_FIELD):
        return ()
    elements, method = resolve_elements(plan, stored), plan.method
    computed, storage = elements.computed, None if method.quantization is None else method.quantization.quant_storage
    value, reason = computed, "the base model is stored in it" if plan.model.dtype is None else "of spec.model.dtype"
    if computed == Dtype.FLOAT32:
        value, reason = Precision.FP32.value, f"{reason}; {Precision.BF16.value} is faster"
    # FSDP would cast packed weights stored in another floating type as if they were ordinary numbers, which destroys them.
    elif computed == Dtype.BFLOAT16 and storage in (None, QuantStorage.UINT8, QuantStorage.BFLOAT16):
        value = Precision.BF16.value
    elif elements.param is None and method.autocast_adapter_dtype and not method.is_fused:
        reason += "; of adapters in float32, in which they are held"
    return (Choice(field=PRECISION_FIELD, value=value, reason=reason),)


def varlen_problem(plan: RunPlan, facts: ArchitectureFacts, stored: str) -> str:
    """Say why torch's attention for documents of different lengths does not fit a model's configuration; empty if it does.

    Its kernels (flash attention, cuDNN) support only scores that are plain products of queries and keys, and windows of earlier
    tokens. stored: element type of the base model's files.
    """
    if not facts.has_fused_attention:
        return NOT_FUSED
    if facts.score_softcap:
        return "the model caps its attention scores"
    if facts.attention_dropout:
        return "the model drops attention scores at random while it is trained"
    if facts.value_head_size != facts.head_size:
        return "in the model's attention, values and keys have different sizes"
    # A plan that leaves the attention open is for GPUs, even if no profile names one, as in local runs.
    if not (plan.leaves_attention_open or trains_on_gpu(plan)):
        return ""
    if facts.head_size > LARGEST_HEAD or facts.head_size % HEAD_MULTIPLE:
        return f"a head has {facts.head_size} values, and the kernels take a multiple of {HEAD_MULTIPLE} up to {LARGEST_HEAD}"
    computed = resolve_elements(plan, stored).computed
    return "" if computed != "float32" else "this job computes in float32, and the kernels only in 16 bits"


def choose_attention(plan: RunPlan, problem: str) -> tuple[Choice, ...]:
    """Choose the attention if the plan leaves it unset. problem: why varlen does not fit; empty if it does."""
    if not plan.leaves_attention_open:
        return ()
    if problem:
        return (Choice(field=ATTENTION_FIELD, value=Attention.SDPA.value, reason=problem),)
    reason = "needs no mask, and computes no scores between documents"
    return (Choice(field=ATTENTION_FIELD, value=Attention.VARLEN.value, reason=reason),)


def trains_on_gpu(plan: RunPlan) -> bool:
    """Whether the profile gives the training pods a GPU."""
    return plan.placement is not None and plan.placement.gpu_resource_name is not None


def choose_batches(
    plan: RunPlan, limit: MemoryLimit | None, predict: Predict | None, *, can_recompute: bool = True
) -> tuple[Choice, ...]:
    """Choose micro-batch and recomputation, each only if the plan leaves it unset.

    predict: estimates a changed plan; None if the memory planner does not know the model. can_recompute: whether the model's
    layers can be recomputed.
    """
    if not plan.leaves_batches_open:
        return ()
    if limit is None or predict is None:
        who = "the memory that a rank may take is not known" if limit is None else "the memory planner does not know this model"
        return _choices(plan, plan, f"the usual value: {who}")
    least = (plan, -1)
    for candidate in _by_speed(plan, can_recompute=can_recompute):
        total = predict(candidate).total
        if limit.leaves_room_above(total):
            return _choices(plan, candidate, _reason(total, limit, f"of which {KEPT_FREE_PERCENT} % are kept free"))
        if least[1] < 0 or total < least[1]:
            least = (candidate, total)
    return _choices(plan, least[0], _reason(least[1], limit, "and no setting needs less"))


def _by_speed(plan: RunPlan, *, can_recompute: bool) -> Iterator[RunPlan]:
    """Yield every plan that the open settings allow, the fastest first.

    Even one long sequence keeps a device busy, so recomputing layers costs more than smaller micro-batches do.
    """
    training = plan.training
    kinds = list(ActivationCheckpointing) if can_recompute else [ActivationCheckpointing.NONE]
    if training.compile:
        # The rules refuse Selective with compile: a compiled layer hides its matrix products.
        kinds = [kind for kind in kinds if kind is not ActivationCheckpointing.SELECTIVE]
    if not plan.leaves_open(RECOMPUTATION_FIELD):
        kinds = [training.activation_checkpointing]
    sizes = [training.micro_batch_size]
    if plan.leaves_open(MICRO_BATCH_FIELD):
        sizes = micro_batch_sizes(training.global_batch_size // plan.parallelism.world_size)
    for kind in kinds:
        for size in sizes:
            yield plan.with_training(activation_checkpointing=kind, micro_batch_size=size)


def _reason(total: int, limit: MemoryLimit, rest: str) -> str:
    return f"a rank takes about {format_bytes(total)} of {format_bytes(limit.bytes)} ({limit.source}), {rest}"


def _choices(plan: RunPlan, chosen: RunPlan, reason: str) -> tuple[Choice, ...]:
    values = {
        MICRO_BATCH_FIELD: chosen.training.micro_batch_size,
        RECOMPUTATION_FIELD: chosen.training.activation_checkpointing.value,
    }
    return tuple(Choice(field=field, value=value, reason=reason) for field, value in values.items() if plan.leaves_open(field))


def choose_resharding(plan: RunPlan, limit: MemoryLimit | None, predict: Predict | None) -> Choice | None:
    """Choose `reshardAfterForward`; None if the plan sets it. predict: None if the memory planner does not know the model.

    Parameters that stay gathered need not be gathered again for the backward pass. The result is the same, bit by bit.
    """
    if not plan.parallelism.leaves_resharding_open:
        return None
    is_needed, reason = True, "least memory: the memory that a rank may take is not known"
    if predict is None:
        reason = "least memory: the memory planner does not know this model"
    elif limit is not None:
        whole = predict(plan.with_fsdp(reshard_after_forward=False)).total
        is_needed = not limit.leaves_room_above(whole)
        reason = (
            f"with all weights gathered a rank takes about {format_bytes(whole)} of {format_bytes(limit.bytes)} "
            f"({limit.source}), of which {KEPT_FREE_PERCENT} % are kept free"
        )
    return Choice(field=RESHARDING_FIELD, value=is_needed, reason=reason)
