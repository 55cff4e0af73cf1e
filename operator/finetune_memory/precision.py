"""The element type of the computation, if the plan leaves it open: that of the base, for what is trained next to it as well.

A base of 16 bits computes in them anyway, and only a file of the model says whether it is one. What is next to it in float32 as
PEFT's layers hold it would be multiplied in float32, unless the whole job is said to compute in the base's type.
"""

from __future__ import annotations

from finetune_job.api.enumerations import Dtype
from finetune_job.api.method import QuantStorage
from finetune_job.api.training import Precision
from finetune_job.plan.element_types import resolve_elements
from finetune_job.plan.run_plan import PRECISION_FIELD, Choice, RunPlan


def choose_precision(plan: RunPlan, stored: str) -> tuple[Choice, ...]:
    """One choice, if the plan leaves it open. `stored`: element type of the base model's files."""
    if not plan.leaves_open(PRECISION_FIELD):
        return ()
    elements, method = resolve_elements(plan, stored), plan.method
    computed = elements.computed
    value, reason = computed, "the base model is stored in it" if plan.model.dtype is None else "of spec.model.dtype"
    if computed == Dtype.FLOAT32:
        value, reason = Precision.FP32.value, f"{reason}; {Precision.BF16.value} is faster"
    elif computed == Dtype.BFLOAT16 and _may_be_cast(plan):
        value = Precision.BF16.value
    elif elements.param is None and method.autocast_adapter_dtype and not method.is_fused:
        reason += "; of adapters in float32, in which they are held"
    return (Choice(field=PRECISION_FIELD, value=value, reason=reason),)


def _may_be_cast(plan: RunPlan) -> bool:
    """Whether FSDP would leave packed weights what they are: of another floating type it converts them like numbers."""
    quantization = plan.method.quantization
    return quantization is None or quantization.quant_storage in (None, QuantStorage.UINT8, QuantStorage.BFLOAT16)
