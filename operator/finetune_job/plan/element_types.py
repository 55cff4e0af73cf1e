"""Resolves the element types in which a run loads, computes, reduces and saves, from its plan and the stored type of the base.

Trained weights need more precision than computations with them: in 16 bits, small updates are rounded away. So full fine-tuning
holds float32 weights and computes in the model's type; `autocastAdapterDtype` does the same for adapters. Whole modules and
biases that are trained along with adapters are also held in float32, and must compute in the type of the base around them.

FSDP 2 casts everything it gathers to the compute type. Without FSDP 2, autocast casts only the operands of products, so results
would meet a base of another type: some torch operations reject mixed types, and others compute in float32 whatever is held in
float32. So without FSDP 2, a 16-bit base is held in the compute type from the start, the same type that FSDP 2 would compute in.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.api.enumerations import Dtype
from finetune_job.api.method import MethodType
from finetune_job.api.training import GradientReduction, Precision
from finetune_job.plan.run_plan import RunPlan

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}
"""torch's name of an element type -> bytes per value."""


@dataclass(frozen=True)
class Elements:
    """Element types of one run, under torch's names, and how a forward pass casts them."""

    load: str
    """Type in which base weights are held."""
    param: str | None
    """Type of gathered parameters in the forward and backward passes; None if they are not cast."""
    reduce: str | None
    """Type in which gradients are reduced; None if they are not cast."""
    save: str
    """Type of a fully fine-tuned model on disk."""
    casts_parameters: bool
    """Whether FSDP casts parameters, including those of adapters, and layer inputs to `param`. If not, autocast casts inside each
    layer."""

    @property
    def stream(self) -> int:
        """Bytes per value of the activations that one layer passes to the next."""
        return VALUE_BYTES[(self.param or self.load) if self.casts_parameters else self.load]

    @property
    def product(self) -> int:
        """Bytes per value in a matrix product."""
        return VALUE_BYTES[self.computed]

    @property
    def computed(self) -> str:
        """Element type of matrix products."""
        return self.param or self.load

    def adapter(self, dtype: str) -> int:
        """Bytes per value in the computation of an adapter that is held in `dtype`."""
        return VALUE_BYTES[self.param or dtype]

    def adapter_copies_input(self, dtype: str) -> bool:
        """Whether each adapter keeps its own cast copy of the input, because PEFT first casts to the adapter's element type."""
        if self.casts_parameters and self.param:
            return False
        return VALUE_BYTES[dtype] != self.stream or (self.param is not None and VALUE_BYTES[dtype] != self.product)

    @property
    def layers_copy_input(self) -> bool:
        """Whether each trained layer keeps a copy of its input that autocast has cast."""
        return self.stream != self.product


def held_dtype(plan: RunPlan) -> Dtype | None:
    """Return the element type in which an adapter run holds its base; None if it depends on the stored weights."""
    dtypes = {resolve_elements(plan, stored.value).load for stored in Dtype}
    return Dtype(dtypes.pop()) if len(dtypes) == 1 else None


def resolve_elements(plan: RunPlan, stored: str) -> Elements:
    """Return the element types of a run whose base model has weights stored as `stored`."""
    fsdp = plan.parallelism.fsdp
    save = plan.model.dtype.value if plan.model.dtype else stored
    param = fsdp.param_dtype.value if fsdp.param_dtype else None
    load = "float32" if plan.training.precision is Precision.FP32 else save
    if plan.method.type is MethodType.FULL and load != "float32":
        param, load = param or load, "float32"
    elif plan.method.autocast_adapter_dtype and plan.method.trains_parts_of_the_base and load != "float32":
        param = param or load
    is_ordered = plan.training.reduction is GradientReduction.ORDERED
    casts = plan.parallelism.world_size > 1 and fsdp.version == 2 and not is_ordered
    if not casts and param is not None and load != Dtype.FLOAT32:
        load = param
    return Elements(
        load=load, param=param, reduce=fsdp.reduce_dtype.value if fsdp.reduce_dtype else None, save=save, casts_parameters=casts
    )
