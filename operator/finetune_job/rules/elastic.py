"""Rules on elastic gangs: the result must not depend on the number of nodes, and the minimum size must be possible."""

from __future__ import annotations

from finetune_job.api.training import GradientReduction
from finetune_job.rules.launch import against_order
from finetune_job.rules.rule import Problem, RuleContext, rule

_ELASTIC, _MIN_NODES, _NODES, _REDUCTION = (
    "parallelism.elastic",
    "parallelism.elastic.minNodes",
    "parallelism.nodes",
    "training.reduction",
)


@rule("elastic-needs-ordered-reduction")
def elastic_needs_ordered_reduction(context: RuleContext) -> Problem | None:
    if context.spec.parallelism.elastic is None or context.spec.training.reduction is GradientReduction.ORDERED:
        return None
    reason = next(against_order(context), None)
    fix = f"set {_REDUCTION} to {GradientReduction.ORDERED}, or remove {_ELASTIC}"
    return Problem(
        value=context.spec.parallelism.elastic.model_dump(mode="json", by_alias=True),
        message=f"the gang may change its number of ranks, and with {_REDUCTION} {context.spec.training.reduction} that would "
        "change the result",
        fix=fix if reason is None else f"remove {_ELASTIC}; {GradientReduction.ORDERED} is not possible: {reason}",
        changes={_REDUCTION: GradientReduction.ORDERED} if reason is None else {_ELASTIC: None},
    )


@rule("elastic-min-nodes-above-nodes")
def elastic_min_nodes_above_nodes(context: RuleContext) -> Problem | None:
    ranks = context.spec.parallelism
    if ranks.elastic is None or ranks.elastic.min_nodes <= ranks.nodes:
        return None
    return Problem(
        value=ranks.elastic.min_nodes,
        message=f"the gang has at most {ranks.nodes} node{'s' if ranks.nodes > 1 else ''}, by {_NODES}",
        fix=f"set {_MIN_NODES} to {ranks.nodes} or fewer, or raise {_NODES}",
        changes={_MIN_NODES: ranks.nodes},
    )
