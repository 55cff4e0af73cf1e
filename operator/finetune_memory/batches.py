"""What the estimate decides where a plan leaves it open: micro-batch, recomputation, and whether gathered weights stay.

All of it alters speed and memory alone. Memory is taken for speed as long as a part of the limit stays free, because an estimate
may be wrong; if nothing leaves it free, the settings that need the least are chosen, so that no setting which the user left open
is the reason of a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from finetune_job.api.training import ActivationCheckpointing
from finetune_job.plan.resolve_training import micro_batch_sizes
from finetune_job.plan.run_plan import MICRO_BATCH_FIELD, RECOMPUTATION_FIELD, RESHARDING_FIELD, Choice, RunPlan
from finetune_memory.estimate import Estimate
from finetune_memory.limit import KEPT_FREE_PERCENT, MemoryLimit, format_bytes

Predict = Callable[[RunPlan], Estimate]


def choose_batches(
    plan: RunPlan, limit: MemoryLimit | None, predict: Predict | None, *, can_recompute: bool = True
) -> tuple[Choice, ...]:
    """Micro-batch and recomputation, each if the plan leaves it open.

    predict: the estimate of a changed plan; None if the memory planner does not know the model. can_recompute: whether the
    model's layers can be computed again.
    """
    if not plan.leaves_batches_open:
        return ()
    if limit is None or predict is None:
        who = "nobody has said how much a rank may take" if limit is None else "the memory planner does not know this model"
        return _choices(plan, plan, f"the usual one: {who}")
    least = (plan, -1)
    for candidate in _by_speed(plan, can_recompute=can_recompute):
        total = predict(candidate).total
        if limit.leaves_room_above(total):
            return _choices(plan, candidate, _reason(total, limit, f"of which {KEPT_FREE_PERCENT} % are kept free"))
        if least[1] < 0 or total < least[1]:
            least = (candidate, total)
    return _choices(plan, least[0], _reason(least[1], limit, "and nothing needs less"))


def _by_speed(plan: RunPlan, *, can_recompute: bool) -> Iterator[RunPlan]:
    """Every plan that the open settings allow, the fastest first: a device is busy with one long sequence, and what is computed
    again costs more than smaller batches do.
    """
    training = plan.training
    kinds = list(ActivationCheckpointing) if can_recompute else [ActivationCheckpointing.NONE]
    if training.compile:
        # The rules refuse it: a compiled layer hides its matrix products.
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
    """What `reshardAfterForward` becomes; None if the plan leaves nothing open. `predict`: None if nobody can.

    Parameters that stay gathered are not gathered again for the backward pass, and the result has the same bits.
    """
    if not plan.parallelism.leaves_resharding_open:
        return None
    is_needed, reason = True, "least memory: nobody has said how much a rank may take"
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
