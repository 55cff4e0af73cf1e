"""What a manifest comes to once everything it leaves open is chosen: rules judge that, never a second set of defaults."""

from finetune_job.api.base import Dtype
from finetune_job.api.training import Precision
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.context import RuleContext


def effective_plan(context: RuleContext) -> RunPlan:
    """The plan that this manifest would get. Total: it exists for manifests that will be refused, too."""
    return context.plan


def held_dtype(plan: RunPlan) -> Dtype | None:
    """Element type in which an adapter run holds its base; None where only the stored weights can tell."""
    return Dtype.FLOAT32 if plan.training.precision is Precision.FP32 else plan.model.dtype
