"""What a manifest comes to once everything it leaves open is chosen: rules judge that, never a second set of defaults."""

from finetune_job.api.base import Dtype
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.plan.element_types import resolve_elements
from finetune_job.plan.run_plan import FsdpPlan, RunPlan
from finetune_job.rules.context import RuleContext


def effective_plan(context: RuleContext) -> RunPlan:
    """The plan that this manifest would get. Total: it exists for manifests that will be refused, too."""
    return context.plan


def held_dtype(plan: RunPlan) -> Dtype | None:
    """Element type in which an adapter run holds its base; None where only the stored weights can tell."""
    held = {resolve_elements(plan, stored.value).load for stored in Dtype}
    return Dtype(held.pop()) if len(held) == 1 else None


LEAF_CLASSES = ("Linear", "Linear4bit")
"""Classes of adapters and of the layers around them, which a plan may name as units."""


def may_part_adapters(fsdp: FsdpPlan) -> bool:
    """Whether units may be so small that adapters and base lie apart without PEFT's wrap policy; preflight sees whether they do."""
    if fsdp.auto_wrap_policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
        return not set(LEAF_CLASSES).isdisjoint(fsdp.transformer_layer_cls_to_wrap or ())
    return fsdp.auto_wrap_policy is AutoWrapPolicy.SIZE_BASED_WRAP
