"""The element types in which a run loads, computes, reduces and saves, from its plan and the stored type.

Trained weights need more bits than their products: small updates of 16-bit weights are rounded away. So full fine-tuning holds
float32 weights and computes in the model's type; for adapters `autocastAdapterDtype` does the same. Whole modules and biases that
are trained together with adapters are held in float32 with them, and must then compute in the type of the base around them.

FSDP 2 casts whatever it gathers to the type of the computation. Elsewhere autocast casts only the operands of products, and their
results would meet a base of another type: some operations of torch refuse two types, and others compute in float32 only what is
held in float32. There a 16-bit base is held in the type of the computation from the start, the type in which FSDP 2 would also
compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.api.enumerations import Dtype
from finetune_job.api.method import MethodType
from finetune_job.api.training import GradientReduction, Precision
from finetune_job.plan.run_plan import RunPlan

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}
"""torch's name of an element type -> bytes of a value."""


@dataclass(frozen=True)
class Elements:
    """Element types of one run, by torch's names, and how a forward pass casts them."""

    load: str
    """Type in which base weights are held."""
    param: str | None
    """Type of gathered parameters in forward and backward; None: as they are held."""
    reduce: str | None
    """Type of gradients while they are reduced."""
    save: str
    """Type of a fully fine-tuned model on disk."""
    casts_parameters: bool
    """Whether FSDP casts parameters to `param`, layer inputs and adapters included. Otherwise autocast casts inside each
    layer."""

    @property
    def stream(self) -> int:
        """Bytes of a value that one layer passes to the next."""
        return VALUE_BYTES[(self.param or self.load) if self.casts_parameters else self.load]

    @property
    def product(self) -> int:
        """Bytes of a value in a matrix product."""
        return VALUE_BYTES[self.computed]

    @property
    def computed(self) -> str:
        """Element type of matrix products."""
        return self.param or self.load

    def adapter(self, dtype: str) -> int:
        """Bytes of a value in an adapter's computation."""
        return VALUE_BYTES[self.param or dtype]

    def adapter_copies_input(self, dtype: str) -> bool:
        """Whether each adapter casts its input and keeps its own copy: PEFT casts to the adapter's element type first."""
        if self.casts_parameters and self.param:
            return False
        return VALUE_BYTES[dtype] != self.stream or (self.param is not None and VALUE_BYTES[dtype] != self.product)

    @property
    def layers_copy_input(self) -> bool:
        """Whether autocast casts the input of each trained layer, and the layer keeps the copy."""
        return self.stream != self.product


def held_dtype(plan: RunPlan) -> Dtype | None:
    """Return the element type in which an adapter run holds its base; None if it is that of the stored weights."""
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
