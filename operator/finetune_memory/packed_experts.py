"""The share of a base that QLoRA packs, and the finding that the experts of a mixture-of-experts model are not packed.

Experts are stacked parameters; bitsandbytes packs linear layers (docs/explanation/decisions/0018-experts-are-not-packed.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune_job.api.method import MethodType
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.plan.method_plan import MethodPlan
from finetune_memory.model_shape import ParameterShape

_UNPACKED = {MethodType.QLORA: MethodType.LORA.value, MethodType.QDORA: MethodType.DORA.value}
_STACKED_DIMENSIONS = 3


@dataclass(frozen=True)
class Packing:
    """Numbers of a base's frozen values: of all, of packed ones, and of those in experts."""

    total: int
    packed: int
    experts: Mapping[str, int]
    """Maps the name of each stacked parameter to the number of its values."""

    @property
    def packed_share(self) -> float:
        return self.packed / max(self.total, 1)

    @property
    def expert_share(self) -> float:
        return sum(self.experts.values()) / max(self.total, 1)


def packing(base: Sequence[ParameterShape], packed_base: Sequence[ParameterShape]) -> Packing:
    """Count the values that are packed. base: parameters before they are packed. packed_base: the same parameters afterwards."""
    frozen = [pair for pair in zip(base, packed_base, strict=True) if not pair[0].is_trained]
    return Packing(
        total=sum(before.numel for before, _ in frozen),
        packed=sum(before.numel for before, after in frozen if after is not before),
        experts={
            before.name: before.numel
            for before, _ in frozen
            if len(before.shape) == _STACKED_DIMENSIONS and "expert" in before.name
        },
    )


def experts_not_packed(method: MethodPlan, counts: Packing, dtype: str) -> Finding | None:
    """Return the finding if experts stay unpacked. dtype: their element type."""
    if method.quantization is None or not counts.experts:
        return None
    bits, first = method.quantization.bits, next(iter(counts.experts))
    return make_finding(
        "experts-not-packed",
        field="spec.method.type",
        value=method.type.value,
        message=f"only {counts.packed_share:.1%} of the base is packed to {bits} bits: only linear layers are, and the experts "
        f"are {len(counts.experts)} stacked parameters, such as {first}; their {counts.expert_share:.1%} stay in {dtype}",
        fix="expect 16 bits for the experts, as the memory estimate does; "
        f"set spec.method.type: {_UNPACKED[method.type]} if too little is packed",
    )
