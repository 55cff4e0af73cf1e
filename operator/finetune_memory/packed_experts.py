"""How much of a base QLoRA packs, and that the experts of a mixture are not among it.

They are stacked parameters, and bitsandbytes packs linear layers (docs/explanation/decisions/0018-experts-are-not-packed.md).
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
    """Numbers of frozen values."""

    total: int
    packed: int
    experts: Mapping[str, int]
    """By name of the stacked parameters."""

    @property
    def packed_share(self) -> float:
        return self.packed / max(self.total, 1)

    @property
    def expert_share(self) -> float:
        return sum(self.experts.values()) / max(self.total, 1)


def packing(base: Sequence[ParameterShape], held: Sequence[ParameterShape]) -> Packing:
    """base: parameters before they are packed; held: the same ones afterwards."""
    frozen = [pair for pair in zip(base, held, strict=True) if not pair[0].is_trained]
    return Packing(
        total=sum(each.numel for each, _ in frozen),
        packed=sum(each.numel for each, after in frozen if after is not each),
        experts={each.name: each.numel for each, _ in frozen if len(each.shape) == _STACKED_DIMENSIONS and "expert" in each.name},
    )


def experts_not_packed(method: MethodPlan, found: Packing, dtype: str) -> Finding | None:
    """dtype: in which the experts stay."""
    if method.quantization is None or not found.experts:
        return None
    bits, first = method.quantization.bits, next(iter(found.experts))
    return make_finding(
        "experts-not-packed",
        field="spec.method.type",
        value=method.type.value,
        message=f"only {found.packed_share:.1%} of the base are packed to {bits} bits: linear layers are, and the experts are "
        f"{len(found.experts)} stacked parameters, first {first}; their {found.expert_share:.1%} stay in {dtype}",
        fix="count on 16 bits for the experts, as the memory estimate does; "
        f"set spec.method.type: {_UNPACKED[method.type]} if so little is packed",
    )
