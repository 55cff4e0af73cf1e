"""What varies, as plain data: the dimensions, their values, and to which combinations a dimension applies.

Values marked `bad` are those that a user writes by mistake. A case drawn for coverage has at most one of them, because two hide
each other; every pair of a bad value and any other is still covered.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_job.methods import METHODS, Family
from tests.support.cases import table
from tests.sweep.architectures import ARCHITECTURES
from tests.sweep.case import UNSET

Values = Mapping[str, str]


@dataclass(frozen=True)
class Dimension:
    """One thing that varies."""

    name: str
    good: tuple[str, ...]
    bad: tuple[str, ...] = ()
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """It applies where each of these earlier dimensions has one of these values."""

    def applies(self, chosen: Values) -> bool:
        """Whether it means anything beside these values of earlier dimensions."""
        return all(chosen.get(name, UNSET) in accepted for name, accepted in self.needs.items())

    @property
    def values(self) -> tuple[str, ...]:
        return (*self.good, *self.bad)


def _methods(*families: Family) -> dict[str, tuple[str, ...]]:
    return {"method": tuple(kind.value for kind, method in METHODS.items() if method.family in families)}


_QUANTIZED = {"method": ("QLoRA", "QDoRA")}
_SHARDED = {"ranks": ("2",)}
_SUPPORTED = tuple(kind.value for kind, method in METHODS.items() if not method.refused)
_REFUSED = tuple(kind.value for kind, method in METHODS.items() if method.refused)
_NEEDS: dict[str, Mapping[str, tuple[str, ...]]] = {
    "lora": _methods(Family.LORA),
    "other": _methods(Family.OTHER),
    "quantized": _QUANTIZED,
    "unquantized": {"method": tuple(kind.value for kind in METHODS if kind.value not in _QUANTIZED["method"])},
    "merged": {"merge": (UNSET, "true")},
    "sharded": _SHARDED,
    "first": {**_SHARDED, "version": ("1",)},
    "second": {**_SHARDED, "version": (UNSET, "2")},
    "experts": {"architecture": tuple(name for name, architecture in ARCHITECTURES.items() if architecture.experts)},
}


def _dimension(row: Mapping[str, Any]) -> Dimension:
    needs: dict[str, tuple[str, ...]] = {}
    for need in row.get("needs", ()):
        needs |= _NEEDS[need] if isinstance(need, str) else {name: tuple(values) for name, values in need.items()}
    return Dimension(row["name"], tuple(row["good"]), tuple(row.get("bad", ())), needs)


DIMENSIONS: tuple[Dimension, ...] = (
    Dimension("method", _SUPPORTED, _REFUSED),
    Dimension("architecture", tuple(ARCHITECTURES)),
    *map(_dimension, table(__file__, "DIMENSIONS")),
)
BY_NAME = {dimension.name: dimension for dimension in DIMENSIONS}
USUAL = {"method": "LoRA", "architecture": "llama", "stored": "bfloat16", "ranks": "2", "r": "4"}
"""What stands where nothing else is drawn; every other dimension is unset."""
