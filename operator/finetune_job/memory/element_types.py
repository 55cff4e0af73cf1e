"""Which element type is used where: plan and stored type -> types of loading, computing, reducing and saving.

Trained weights need more bits than their products: updates of 16-bit weights round to nothing. So full fine-tuning holds float32
weights and computes in the model's type; adapters see to the same with `autocastAdapterDtype`. Whole modules and biases that are
trained beside adapters are held in float32 with them, and must then compute in the type of the base around them.

FSDP 2 casts whatever it gathers to the type of the computation. Elsewhere autocast casts the operands of products alone, and
what comes after them would meet a base of another type: torch has operations that refuse two types, and computes in float32 only
what is held in float32. There a 16-bit base is held in the type of the computation from the start, which is what FSDP 2 would
compute with, too.
"""

from __future__ import annotations

from finetune_job.api.base import Dtype
from finetune_job.api.method import MethodType
from finetune_job.api.training import Precision
from finetune_job.memory.workload import Elements
from finetune_job.plan.run_plan import RunPlan


def resolve_elements(plan: RunPlan, stored: str) -> Elements:
    """Element types of a run on a base model whose weights are stored as `stored`."""
    fsdp = plan.parallelism.fsdp
    save = plan.model.dtype.value if plan.model.dtype else stored
    param = fsdp.param_dtype.value if fsdp.param_dtype else None
    load = "float32" if plan.training.precision is Precision.FP32 else save
    if plan.method.type is MethodType.FULL and load != "float32":
        param, load = param or load, "float32"
    elif plan.method.autocast_adapter_dtype and plan.method.trains_parts_of_the_base and load != "float32":
        param = param or load
    casts = plan.parallelism.world_size > 1 and fsdp.version == 2
    if not casts and param is not None and load != Dtype.FLOAT32:
        load = param
    return Elements(
        load=load,
        param=param,
        reduce=fsdp.reduce_dtype.value if fsdp.reduce_dtype else None,
        save=save,
        casts_parameters=casts,
    )
