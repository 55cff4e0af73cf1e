"""Which change of the job makes it fit: the cheapest for the user, and of equally cheap ones the largest micro-batch.

Changes that alter only speed come first, then more devices, then what alters the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from finetune_job.api.enumerations import Dtype, MergeBase
from finetune_job.api.output import AccessMode
from finetune_job.api.training import ActivationCheckpointing, Precision
from finetune_job.finding import FieldChange
from finetune_job.method_settings import effective_settings
from finetune_job.methods import METHODS, Family, lora_kind
from finetune_job.names import workspace_claim_name
from finetune_job.plan.method_plan import QuantizationPlan
from finetune_job.plan.resolve_model import DEFAULT_DOUBLE_QUANT, DEFAULT_QUANT_TYPE
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.rule import changes_text
from finetune_job.sharding import SHARDED_BITS
from finetune_memory.estimate import Estimate

SHORTEST_SEQUENCE = 256
"""Tokens; shorter ones would drop most of the records of most data sets."""
MAX_RANKS_FACTOR = 16
_MIN_NODES, _NODES = "parallelism.elastic.minNodes", "parallelism.nodes"
_ACCESS_MODE = "workspace.volumeClaimTemplate.accessMode"
_SHRINK_COST, _RECOMPUTE_COST, _RANKS_COST, _QUANTISE_COST, _ENLARGE_COST, _SHORTEN_COST = 1, 3, 20, 60, 100, 200


@dataclass(frozen=True)
class Alternative:
    """Changes of the manifest that together make the job fit."""

    changes: tuple[FieldChange, ...]
    estimate: Estimate

    @property
    def text(self) -> str:
        """The changes as people write them."""
        return changes_text(self.changes)


@dataclass(frozen=True)
class _Change:
    """A setting of one kind of change; no changes: as it is."""

    cost: float
    changes: tuple[tuple[str, Any], ...]
    apply: Callable[[RunPlan], RunPlan]


@dataclass(frozen=True)
class Site:
    """What is known of the place where the job runs, besides the plan."""

    has_gpus: bool = False
    most_ranks: int | None = None
    """Of one machine, which has no further nodes; None: there are as many as are asked for."""


ANYWHERE = Site()


def cheapest_fitting(
    plan: RunPlan, limit: int, predict: Callable[[RunPlan], Estimate], site: Site = ANYWHERE
) -> Alternative | None:
    """The cheapest combination of changes whose estimate is within `limit`; None where none is.

    `predict`: the estimate of a changed plan. The global batch grows only if it does not split over the ranks that are needed.
    """
    if leanest(plan, predict, site).estimate.total > limit:
        return None
    combinations = sorted(itertools.product(*_change_options(plan, site)), key=lambda steps: sum(step.cost for step in steps))
    for steps in combinations:
        made = _combined(steps, plan)
        if made is None or not made[1]:
            continue
        found = predict(made[0])
        if found.total <= limit:
            return _alternative(made[1], found)
    return None


def leanest(plan: RunPlan, predict: Callable[[RunPlan], Estimate], site: Site = ANYWHERE) -> Alternative:
    """All changes that save memory; where no combination is within a limit, neither is this."""
    *saving, precise, quantised = _change_options(plan, site)
    # Packing the base saves, but not while it is loaded; products in 16 bits need further copies of stacked experts.
    either = itertools.product(precise, quantised)
    most = [_combined([*(options[-1] for options in saving), *steps], plan) for steps in either]
    made = [_alternative(changes, predict(changed)) for changed, changes in (each for each in most if each is not None)]
    return min(made, key=lambda each: each.estimate.total, default=_alternative([], predict(plan)))


def _alternative(changes: list[tuple[str, Any]], estimate: Estimate) -> Alternative:
    return Alternative(tuple(FieldChange(field=f"spec.{field}", value=value) for field, value in changes), estimate)


def _change_options(plan: RunPlan, site: Site) -> list[list[_Change]]:
    ranks = _ranks(plan) if site.most_ranks is None else _ranks_of_one_machine(plan, site.most_ranks)
    return [
        *(ranks, _recomputed(plan), _resharded(plan), _shortened(plan), _micro(plan), _precise(plan)),
        _quantised(plan, has_gpus=site.has_gpus),
    ]


def _combined(steps: Iterable[_Change], plan: RunPlan) -> tuple[RunPlan, list[tuple[str, Any]]] | None:
    """The changed plan and what was changed; None where the global batch cannot be cut in that way."""
    changes: list[tuple[str, Any]] = []
    for step in steps:
        plan = step.apply(plan)
        changes += step.changes
    training, world_size = plan.training, plan.parallelism.world_size
    at_once = training.micro_batch_size * world_size
    if training.global_batch_size % at_once:
        return None
    training = training.model_copy(update={"gradient_accumulation_steps": training.global_batch_size // at_once})
    return plan.model_copy(update={"training": training}), changes


def _unchanged(plan: RunPlan) -> RunPlan:
    return plan


_AS_IT_IS = _Change(0, (), _unchanged)


def _updated(part: str, **values: Any) -> Callable[[RunPlan], RunPlan]:
    return lambda plan: plan.model_copy(update={part: getattr(plan, part).model_copy(update=values)})


def _micro(plan: RunPlan) -> list[_Change]:
    micro = plan.training.micro_batch_size
    smaller = [size for size in range(micro - 1, 0, -1) if micro % size == 0]
    return [
        _AS_IT_IS,
        *(
            _Change(
                _SHRINK_COST + number / 100, (("training.microBatchSize", size),), _updated("training", micro_batch_size=size)
            )
            for number, size in enumerate(smaller)
        ),
    ]


def _recomputed(plan: RunPlan) -> list[_Change]:
    order = [ActivationCheckpointing.NONE, ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL]
    more = order[order.index(plan.training.activation_checkpointing) + 1 :]
    if plan.training.compile:
        # The rules refuse it: a compiled layer hides its matrix products.
        more = [kind for kind in more if kind is not ActivationCheckpointing.SELECTIVE]
    return [
        _AS_IT_IS,
        *(
            _Change(
                _RECOMPUTE_COST + number,
                (("training.activationCheckpointing", kind.value),),
                _updated("training", activation_checkpointing=kind),
            )
            for number, kind in enumerate(more)
        ),
    ]


def _resharded(plan: RunPlan) -> list[_Change]:
    if plan.parallelism.fsdp.reshard_after_forward is not False:
        return [_AS_IT_IS]
    return [
        _AS_IT_IS,
        _Change(
            _SHRINK_COST,
            (("parallelism.fsdp.reshardAfterForward", True),),
            lambda changed: changed.with_fsdp(reshard_after_forward=True),
        ),
    ]


def _precise(plan: RunPlan) -> list[_Change]:
    """Products in bfloat16: adapters next to a 16-bit base otherwise compute in float32, and keep copies of their inputs."""
    if plan.parallelism.fsdp.param_dtype is not None or plan.model.dtype is Dtype.FLOAT32:
        return [_AS_IT_IS]
    cost = _RECOMPUTE_COST - 1 if plan.training.precision is None else _QUANTISE_COST / 2

    def apply(changed: RunPlan) -> RunPlan:
        return _updated("training", precision=Precision.BF16)(changed).with_fsdp(param_dtype=Dtype.BFLOAT16)

    return [_AS_IT_IS, _Change(cost, (("training.precision", Precision.BF16.value),), apply)]


def _ranks(plan: RunPlan) -> list[_Change]:
    steps, nodes = [_AS_IT_IS], plan.parallelism.nodes
    if _is_for_one_rank(plan):
        return steps
    fewest = plan.parallelism.min_nodes
    if fewest is not None:
        larger = sorted({min(fewest * times, nodes) for times in (2, 4, 8, 16)} - {fewest})
        steps += [
            _Change(_SHRINK_COST + 1 + size / nodes, ((_MIN_NODES, size),), _updated("parallelism", min_nodes=size))
            for size in larger
        ]
    times = 2
    while times <= MAX_RANKS_FACTOR:
        # Whole nodes: how many devices one has nobody has said. Of an elastic gang the fewest nodes have to suffice.
        size = nodes * times
        changed = ((_NODES, size), *_shared_workspace(plan), *(((_MIN_NODES, size),) if fewest is not None else ()))
        more = _updated("parallelism", nodes=size, min_nodes=None if fewest is None else size)
        steps.append(_on_more_ranks(plan, more, changed, _RANKS_COST + times))
        times *= 2
    return steps


def _makes_workspace(plan: RunPlan) -> bool:
    return plan.workspace.claim == workspace_claim_name(plan.job.name)


def _shared_workspace(plan: RunPlan) -> tuple[tuple[str, Any], ...]:
    """What several nodes need of a workspace that the job makes for itself."""
    is_new_need = _makes_workspace(plan) and plan.parallelism.nodes == 1
    return ((_ACCESS_MODE, AccessMode.READ_WRITE_MANY.value),) if is_new_need else ()


def demand_on_claim(plan: RunPlan, alternative: Alternative) -> str:
    """What the changes ask of a workspace claim that the job only names; empty: nothing new."""
    more_nodes = plan.parallelism.nodes == 1 and any(change.field == f"spec.{_NODES}" for change in alternative.changes)
    if not more_nodes or _makes_workspace(plan):
        return ""
    return f"; several nodes mount the claim {plan.workspace.claim} then, so it must be {AccessMode.READ_WRITE_MANY.value}"


def _ranks_of_one_machine(plan: RunPlan, most: int) -> list[_Change]:
    """Up to as many as it has devices."""
    steps, ranks = [_AS_IT_IS], 2 * plan.parallelism.processes_per_node
    while ranks <= most and not _is_for_one_rank(plan):
        more = _updated("parallelism", processes_per_node=ranks)
        steps.append(_on_more_ranks(plan, more, (("parallelism.processesPerNode", ranks),), _RANKS_COST + ranks))
        ranks *= 2
    return steps


def _on_more_ranks(
    plan: RunPlan, more: Callable[[RunPlan], RunPlan], changes: tuple[tuple[str, Any], ...], cost: float
) -> _Change:
    """With a larger global batch if the written one does not split over so many ranks."""
    batch, ranks = plan.training.global_batch_size, more(plan).parallelism.world_size
    if batch % ranks == 0:
        return _Change(cost, changes, more)
    larger = -(-batch // ranks) * ranks
    enlarged = _updated("training", global_batch_size=larger)
    all_changes = (*changes, ("training.globalBatchSize", larger))
    return _Change(cost + _ENLARGE_COST, all_changes, lambda changed: enlarged(more(changed)))


def _is_for_one_rank(plan: RunPlan) -> bool:
    """Whether the rules refuse the job's settings on several ranks."""
    method = plan.method
    if method.quantization is not None and method.quantization.bits != SHARDED_BITS:
        return True
    if method.adapter is None:
        return False
    settings = effective_settings(method.type, method.adapter.settings)
    return METHODS[method.type].one_rank_setting(settings) is not None


def _quantised(plan: RunPlan, *, has_gpus: bool) -> list[_Change]:
    placement = plan.placement
    has_gpus = has_gpus or (placement is not None and placement.gpu_resource_name is not None)
    entry = METHODS[plan.method.type]
    if entry.family is Family.LORA and entry.packs_base and plan.merge.base is MergeBase.ORIGINAL:
        # A mixture of experts has few weights that are packed, and every rank loads all of it to pack them.
        whole = lora_kind(packs_base=False, magnitudes=entry.needs.magnitudes)
        changes = (("method.type", whole.value), ("method.quantization", None))
        return [_AS_IT_IS, _Change(_QUANTISE_COST, changes, _updated("method", type=whole, quantization=None))]
    can_pack = entry.family is Family.LORA and not entry.packs_base
    if not can_pack or not has_gpus:
        return [_AS_IT_IS]
    kind = lora_kind(packs_base=True, magnitudes=entry.needs.magnitudes)
    packed = QuantizationPlan(
        bits=SHARDED_BITS,
        quant_type=DEFAULT_QUANT_TYPE,
        double_quant=DEFAULT_DOUBLE_QUANT,
        compute_dtype=None,
        quant_storage=None,
    )
    change = _updated("method", type=kind, quantization=packed)
    return [_AS_IT_IS, _Change(_QUANTISE_COST, (("method.type", kind.value),), change)]


def _shortened(plan: RunPlan) -> list[_Change]:
    steps, length = [_AS_IT_IS], plan.data.max_sequence_length // 2
    while length >= SHORTEST_SEQUENCE:
        steps.append(
            _Change(
                _SHORTEN_COST + len(steps), (("data.maxSequenceLength", length),), _updated("data", max_sequence_length=length)
            )
        )
        length //= 2
    return steps
