"""Elastic gangs: what their result must not depend on, and how small they may be."""

from __future__ import annotations

from finetune_job.api.training import GradientReduction
from finetune_job.rules.launch import ORDER_DEPENDS_ON, against_order
from finetune_job.rules.rule import OURS, Problem, RuleContext, rule

_ELASTIC, _MIN_NODES, _NODES, _REDUCTION = (
    "parallelism.elastic",
    "parallelism.elastic.minNodes",
    "parallelism.nodes",
    "training.reduction",
)


@rule(
    "elastic-needs-ordered-reduction",
    "An elastic gang needs a result that its number of ranks does not change",
    reads=(_ELASTIC, _REDUCTION, *ORDER_DEPENDS_ON),
    sources=("dropout is seeded by rank, and a sum in floating point depends on its order",),
    holds_for=OURS,
    not_reproduced="no library fails: the result would depend on how many nodes were free, and no error says so",
)
def elastic_needs_ordered_reduction(context: RuleContext) -> Problem | None:
    if context.spec.parallelism.elastic is None or context.spec.training.reduction is GradientReduction.ORDERED:
        return None
    reason = next(against_order(context), None)
    fix = f"set {_REDUCTION} to {GradientReduction.ORDERED}, or remove {_ELASTIC}"
    return Problem(
        field=_ELASTIC,
        value=context.spec.parallelism.elastic.model_dump(mode="json", by_alias=True),
        message=f"the gang may change its number of ranks, and with {_REDUCTION} {context.spec.training.reduction} that would "
        "change the result",
        fix=fix if reason is None else f"remove {_ELASTIC}; {GradientReduction.ORDERED} is not possible: {reason}",
        changes={_REDUCTION: GradientReduction.ORDERED} if reason is None else {_ELASTIC: None},
    )


@rule(
    "elastic-min-nodes-above-nodes",
    "The fewest nodes of an elastic gang cannot be more than the most",
    reads=(_MIN_NODES, _NODES),
    sources=("the ranks on parallelism.nodes are the parts of a global batch, and no gang has more ranks than parts",),
    holds_for=OURS,
    not_reproduced="no library reads the field: the bounds of a gang are this product's own",
)
def elastic_min_nodes_above_nodes(context: RuleContext) -> Problem | None:
    ranks = context.spec.parallelism
    if ranks.elastic is None or ranks.elastic.min_nodes <= ranks.nodes:
        return None
    return Problem(
        field=_MIN_NODES,
        value=ranks.elastic.min_nodes,
        message=f"the gang has at most {ranks.nodes} node{'s' if ranks.nodes > 1 else ''}, by {_NODES}",
        fix=f"set {_MIN_NODES} to {ranks.nodes} or fewer, or raise {_NODES}",
        changes={_MIN_NODES: ranks.nodes},
    )


RULES = (elastic_needs_ordered_reduction, elastic_min_nodes_above_nodes)
