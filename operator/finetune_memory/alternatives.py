"""Finds the cheapest changes that make a job fit; of equally cheap ones, those with the largest micro-batch.

Changes that affect only speed are the cheapest, then more devices, then changes that affect the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from finetune_job.plan.run_plan import GLOBAL_BATCH_FIELD, RunPlan
from finetune_job.rules.rule import changes_text
from finetune_job.sharding import SHARDED_BITS
from finetune_memory.estimate import Estimate

SHORTEST_SEQUENCE = 256
"""Number of tokens in the shortest sequence that is proposed; with fewer, most data sets would lose most of their records."""
MAX_RANKS_FACTOR = 16
USUAL_DEVICES = 8
"""Number of devices in the largest usual node."""
_NODES, _PROCESSES, _MIN_NODES = "parallelism.nodes", "parallelism.processesPerNode", "parallelism.elastic.minNodes"
_SHRINK_COST, _RECOMPUTE_COST, _RANKS_COST, _QUANTISE_COST, _ENLARGE_COST, _SHORTEN_COST = 1, 3, 20, 60, 100, 200

Predict = Callable[[RunPlan], Estimate]


@dataclass(frozen=True)
class Alternative:
    """Changes to the manifest that together make the job fit."""

    changes: tuple[FieldChange, ...]
    estimate: Estimate

    @property
    def text(self) -> str:
        """The changes as they are shown to users."""
        return changes_text(self.changes)


@dataclass(frozen=True)
class Site:
    """Facts about the place where the job runs that are not in its plan."""

    has_gpus: bool = False
    most_ranks: int | None = None
    """Maximum number of ranks if the job has only this machine; None if there are as many nodes as the job requests."""


ANYWHERE = Site()


@dataclass(frozen=True)
class _Change:
    """One way to change a job; the default changes nothing."""

    cost: float = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the manifest below `spec`, with their new values."""
    parts: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Maps the name of a part of the plan to the new values in that part."""


def cheapest_fitting(plan: RunPlan, limit: int, predict: Predict, site: Site = ANYWHERE) -> Alternative | None:
    """Find the cheapest combination of changes whose estimate is within `limit`; None if there is none.

    predict: estimates a changed plan. The global batch grows only if it cannot be split evenly over the needed ranks.
    """
    if leanest(plan, predict, site).estimate.total > limit:
        return None
    combinations = sorted(itertools.product(*_options(plan, site)), key=lambda steps: sum(step.cost for step in steps))
    alternatives = (_alternative(plan, steps, predict) for steps in combinations if any(step.fields for step in steps))
    return next((changed for changed in alternatives if changed is not None and changed.estimate.total <= limit), None)


def leanest(plan: RunPlan, predict: Predict, site: Site = ANYWHERE) -> Alternative:
    """Make all changes that save memory. If the resulting estimate exceeds a limit, so does every other combination's."""
    *saving, precise, quantised = _options(plan, site)
    # These may cost more than they save: a base is held whole while it is packed, and 16-bit products copy stacked experts.
    combinations = [(*(options[-1] for options in saving), *steps) for steps in itertools.product(precise, quantised)]
    alternatives = [changed for steps in combinations if (changed := _alternative(plan, steps, predict)) is not None]
    return min(alternatives, key=lambda alternative: alternative.estimate.total, default=Alternative((), predict(plan)))


def demand_on_cluster(plan: RunPlan, alternative: Alternative) -> str:
    """Say what the changes require of a node, or of a workspace claim that is not the operator's; empty if nothing."""
    values = {change.field: change.value for change in alternative.changes}
    if (ranks := values.get(f"spec.{_PROCESSES}")) is not None:
        return f"; a node then needs {ranks} devices, else set spec.{_NODES} to {ranks // plan.parallelism.processes_per_node}"
    more_nodes = plan.parallelism.nodes == 1 and f"spec.{_NODES}" in values
    if not more_nodes or plan.workspace.claim == workspace_claim_name(plan.job.name):
        return ""
    return f"; several nodes would then mount the claim {plan.workspace.claim}, so it must be {AccessMode.READ_WRITE_MANY.value}"


def _alternative(plan: RunPlan, steps: Sequence[_Change], predict: Predict) -> Alternative | None:
    """Apply the changes to the plan; None if the global batch cannot be split evenly afterwards."""
    for part, values in (entry for step in steps for entry in step.parts.items()):
        if part == "fsdp":
            plan = plan.with_fsdp(**values)
        else:
            plan = plan.model_copy(update={part: getattr(plan, part).model_copy(update=values)})
    training = plan.training
    at_once = training.micro_batch_size * plan.parallelism.world_size
    if training.global_batch_size % at_once:
        return None
    changes = (FieldChange(field=f"spec.{path}", value=value) for step in steps for path, value in step.fields.items())
    return Alternative(tuple(changes), predict(plan.with_training()))


def _options(plan: RunPlan, site: Site) -> list[list[_Change]]:
    """List the options of each kind of change, from no change to the one that saves most."""
    training, fsdp, micro = plan.training, plan.parallelism.fsdp, plan.training.micro_batch_size
    smaller = [
        _Change(_SHRINK_COST + number / 100, {"training.microBatchSize": size}, {"training": {"micro_batch_size": size}})
        for number, size in enumerate(size for size in range(micro - 1, 0, -1) if micro % size == 0)
    ]
    kinds = [ActivationCheckpointing.NONE, ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL]
    kinds = kinds[kinds.index(training.activation_checkpointing) + 1 :]
    if training.compile:
        # The rules refuse Selective with compile: a compiled layer hides its matrix products.
        kinds = [kind for kind in kinds if kind is not ActivationCheckpointing.SELECTIVE]
    recomputed = [
        _Change(
            _RECOMPUTE_COST + number,
            {"training.activationCheckpointing": kind.value},
            {"training": {"activation_checkpointing": kind}},
        )
        for number, kind in enumerate(kinds)
    ]
    resharded: list[_Change] = []
    if fsdp.reshard_after_forward is False:
        parts: dict[str, dict[str, Any]] = {"fsdp": {"reshard_after_forward": True}}
        resharded.append(_Change(_SHRINK_COST, {"parallelism.fsdp.reshardAfterForward": True}, parts))
    shortened: list[_Change] = []
    length = plan.data.max_sequence_length // 2
    while length >= SHORTEST_SEQUENCE:
        parts = {"data": {"max_sequence_length": length}}
        shortened.append(_Change(_SHORTEN_COST + len(shortened) + 1, {"data.maxSequenceLength": length}, parts))
        length //= 2
    precise: list[_Change] = []
    if fsdp.param_dtype is None and plan.model.dtype is not Dtype.FLOAT32:
        # Without this setting, adapters on a 16-bit base compute in float32 and keep copies of their inputs.
        cost = _RECOMPUTE_COST - 1 if training.precision is None else _QUANTISE_COST / 2
        parts = {"training": {"precision": Precision.BF16}, "fsdp": {"param_dtype": Dtype.BFLOAT16}}
        precise.append(_Change(cost, {"training.precision": Precision.BF16.value}, parts))
    ways = (_more_ranks(plan, site), recomputed, resharded, shortened, smaller, precise, _repacked(plan, site))
    return [[_Change(), *changes] for changes in ways]


def _more_ranks(plan: RunPlan, site: Site) -> Iterator[_Change]:
    """Use more devices of the job's only machine, or, on a cluster, where a node's devices are unknown, also add nodes.

    More devices of a single node come first: they need no network and no claim that several nodes mount. An elastic gang must fit
    on its minimum number of nodes.
    """
    method, nodes, fewest = plan.method, plan.parallelism.nodes, plan.parallelism.min_nodes
    if method.quantization is not None and method.quantization.bits != SHARDED_BITS:
        return  # the rules refuse several ranks for this packing, as for some settings of adapters
    if method.adapter is not None:
        settings = effective_settings(method.type, method.adapter.settings)
        if METHODS[method.type].one_rank_setting(settings) is not None:
            return
    # A pod without devices shares its memory among its ranks, so more ranks save nothing.
    of_node = USUAL_DEVICES if site.has_gpus and nodes == 1 and fewest is None else 0
    ranks = 2 * plan.parallelism.processes_per_node
    while ranks <= (of_node if site.most_ranks is None else site.most_ranks):
        yield _on_more_ranks(plan, ranks, {_PROCESSES: ranks}, {"processes_per_node": ranks})
        ranks *= 2
    if site.most_ranks is not None:
        return
    if fewest is not None:
        for size in sorted({min(fewest * times, nodes) for times in (2, 4, 8, 16)} - {fewest}):
            yield _Change(_SHRINK_COST + 1 + size / nodes, {_MIN_NODES: size}, {"parallelism": {"min_nodes": size}})
    times = 2
    while times <= MAX_RANKS_FACTOR:
        size = nodes * times
        fields: dict[str, Any] = {_NODES: size}
        if nodes == 1 and plan.workspace.claim == workspace_claim_name(plan.job.name):
            fields["workspace.volumeClaimTemplate.accessMode"] = AccessMode.READ_WRITE_MANY.value
        if fewest is not None:
            fields[_MIN_NODES] = size
        yield _on_more_ranks(plan, times + of_node, fields, {"nodes": size, "min_nodes": None if fewest is None else size})
        times *= 2


def _on_more_ranks(plan: RunPlan, factor: int, fields: dict[str, Any], values: dict[str, Any]) -> _Change:
    """Change the number of ranks, and enlarge the global batch if it cannot be split evenly over them."""
    batch, ranks = plan.training.global_batch_size, plan.parallelism.model_copy(update=values).world_size
    if batch % ranks == 0:
        return _Change(_RANKS_COST + factor, fields, {"parallelism": values})
    larger = -(-batch // ranks) * ranks
    parts = {"parallelism": values, "training": {"global_batch_size": larger}}
    if plan.leaves_open(GLOBAL_BATCH_FIELD):
        return _Change(_RANKS_COST + factor, fields, parts)
    return _Change(_RANKS_COST + factor + _ENLARGE_COST, {**fields, "training.globalBatchSize": larger}, parts)


def _repacked(plan: RunPlan, site: Site) -> Iterator[_Change]:
    """Pack the base to 4 bits or, if the method already packs it, use the base as it is stored."""
    entry, placement = METHODS[plan.method.type], plan.placement
    if entry.family is not Family.LORA:
        return
    kind = lora_kind(packs_base=not entry.packs_base, magnitudes=entry.needs.magnitudes)
    has_gpus = site.has_gpus or (placement is not None and placement.gpu_resource_name is not None)
    if entry.packs_base and plan.merge.base is MergeBase.ORIGINAL:
        # This may save memory: a mixture of experts has few packed weights, and every rank loads the whole base to pack them.
        fields = {"method.type": kind.value, "method.quantization": None}
        yield _Change(_QUANTISE_COST, fields, {"method": {"type": kind, "quantization": None}})
    elif not entry.packs_base and has_gpus:
        packed = QuantizationPlan(
            bits=SHARDED_BITS,
            quant_type=DEFAULT_QUANT_TYPE,
            double_quant=DEFAULT_DOUBLE_QUANT,
            compute_dtype=None,
            quant_storage=None,
        )
        yield _Change(_QUANTISE_COST, {"method.type": kind.value}, {"method": {"type": kind, "quantization": packed}})
