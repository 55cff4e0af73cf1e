"""Whether torch's attention of documents of different lengths can compute a model's, and the choice if the plan leaves it open.

The kernels (flash attention, cuDNN) know scores as products of queries and keys, a window of the tokens before, and nothing else.
"""

from __future__ import annotations

from finetune_job.api.inputs import Attention
from finetune_job.plan.element_types import resolve_elements
from finetune_job.plan.run_plan import ATTENTION_FIELD, Choice, RunPlan
from finetune_memory.model_shape import ArchitectureFacts

LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
"""Values of a query that flash attention takes."""
NOT_FUSED = "transformers has no fused attention for this architecture"
UNKNOWN = "the memory planner does not know this model"


def varlen_problem(plan: RunPlan, facts: ArchitectureFacts, stored: str) -> str:
    """Why they cannot, by the configuration alone; empty: nothing in it speaks against them.

    `stored`: element type of the base model's files.
    """
    if not facts.has_fused_attention:
        return NOT_FUSED
    if facts.score_softcap:
        return "the model caps its attention scores"
    if facts.attention_dropout:
        return "the model drops attention scores at random while it is trained"
    if facts.value_head_size != facts.head_size:
        return "the model's attention has values of another size than its keys"
    # Only a plan for GPUs leaves the attention open; one for this machine has no profile that would say so.
    if not (plan.leaves_attention_open or trains_on_gpu(plan)):
        return ""
    if facts.head_size > LARGEST_HEAD or facts.head_size % HEAD_MULTIPLE:
        return f"a head has {facts.head_size} values, and the kernels take a multiple of {HEAD_MULTIPLE} up to {LARGEST_HEAD}"
    computed = resolve_elements(plan, stored).computed
    return "" if computed != "float32" else "this job computes in float32, and the kernels in 16 bits alone"


def choose_attention(plan: RunPlan, problem: str) -> tuple[Choice, ...]:
    """One choice, if the plan leaves it open. `problem`: why varlen cannot be; empty: it can."""
    if not plan.leaves_attention_open:
        return ()
    if problem:
        return (Choice(field=ATTENTION_FIELD, value=Attention.SDPA.value, reason=problem),)
    reason = "needs no mask, and computes no pair of tokens of two documents"
    return (Choice(field=ATTENTION_FIELD, value=Attention.VARLEN.value, reason=reason),)


def trains_on_gpu(plan: RunPlan) -> bool:
    """As far as a profile says so."""
    return plan.placement is not None and plan.placement.gpu_resource_name is not None
