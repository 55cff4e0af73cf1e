"""What varies, as plain data: the dimensions, their values, and to which combinations a dimension applies.

Values marked `bad` are those that a user writes by mistake. A case drawn for coverage has at most one of them, because two hide
each other; every pair of a bad value and any other is still covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune_job.methods import METHODS, Family
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


_LORA, _OTHER = _methods(Family.LORA), _methods(Family.OTHER)
_QUANTIZED = {"method": ("QLoRA", "QDoRA")}
_SMALL_INITS = (UNSET, "ZeroB", "gaussian", "orthogonal")
_UNQUANTIZED = {"method": tuple(kind.value for kind in METHODS if kind.value not in _QUANTIZED["method"])}
_MERGED = {"merge": (UNSET, "true")}
_SHARDED = {"ranks": ("2",)}
_FIRST = {**_SHARDED, "version": ("1",)}
_SECOND = {**_SHARDED, "version": (UNSET, "2")}
_HAS_EXPERTS = tuple(name for name, architecture in ARCHITECTURES.items() if architecture.experts)
_SUPPORTED = tuple(kind.value for kind, method in METHODS.items() if not method.refused)
_REFUSED = tuple(kind.value for kind, method in METHODS.items() if method.refused)
_TRUTH = ("true", "false")
_ALL_DTYPES = ("bfloat16", "float16", "float32")


DIMENSIONS: tuple[Dimension, ...] = (
    Dimension("method", _SUPPORTED, _REFUSED),
    Dimension("architecture", tuple(ARCHITECTURES)),
    Dimension("stored", ("bfloat16", "float32", "float16")),
    Dimension("added", (UNSET, "ordinary", "special"), ("one twice", "known")),
    Dimension("model_dtype", (UNSET, *_ALL_DTYPES)),
    Dimension("precision", (UNSET, "bf16", "fp32")),
    Dimension("ranks", ("2", "1")),
    Dimension("version", (UNSET, "1", "2")),
    Dimension("wrap", (UNSET, "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"), needs=_SHARDED),
    Dimension("classes", (UNSET, "right"), ("right and unknown", "empty", "blank", "wrong", "head"), needs=_SHARDED),
    Dimension("use_orig", (UNSET, *_TRUTH), needs=_FIRST),
    Dimension("peft_wrap", (UNSET, *_TRUTH), needs=_FIRST),
    Dimension("sync", (UNSET, *_TRUTH), needs=_FIRST),
    Dimension("ram", (UNSET, *_TRUTH)),
    Dimension("reshard", (UNSET, *_TRUTH), needs=_SECOND),
    Dimension("param_dtype", (UNSET, *_ALL_DTYPES)),
    Dimension("reduce_dtype", (UNSET, *_ALL_DTYPES)),
    Dimension("state_dict", (UNSET, "FULL_STATE_DICT", "SHARDED_STATE_DICT"), ("LOCAL_STATE_DICT",)),
    Dimension("offload", (UNSET, "false"), ("true",)),
    Dimension("fsdp_recompute", (UNSET, *_TRUTH)),
    Dimension("recompute", (UNSET, "None", "Selective", "Full")),
    Dimension("attention", (UNSET, "sdpa", "eager", "varlen")),
    Dimension("r", ("4", UNSET, "1"), needs=_LORA),
    Dimension("rslora", (UNSET, *_TRUTH), needs=_LORA),
    Dimension("dropout", (UNSET, "0.1"), ("1",), needs=_LORA),
    Dimension(
        "targets",
        (UNSET, "attention", "all-linear", "embedding", "head", "embedding and head"),
        ("all-linear and a name", "unknown"),
        needs=_LORA,
    ),
    Dimension("exclude", (UNSET, "one"), needs=_LORA),
    Dimension("layers", (UNSET, "one"), needs={**_LORA, "targets": ("attention", "head")}),
    Dimension(
        "init",
        (UNSET, "ZeroB", "gaussian", "orthogonal", "Random", "pissa", "olora"),
        ("corda", "loftq", "eva"),
        needs=_LORA,
    ),
    Dimension("alpha", (UNSET, "6"), needs={**_LORA, "init": _SMALL_INITS}),
    Dimension("saved", (UNSET, "head", "embedding", "norm", "head and embedding"), ("adapted", "unknown"), needs=_LORA),
    Dimension("rank_pattern", (UNSET, "one"), ("unknown",), needs=_LORA),
    Dimension("alpha_pattern", (UNSET, "one"), needs=_LORA),
    Dimension("lora_plus", (UNSET, "4"), ("0.5",), needs=_LORA),
    Dimension("bias", (UNSET, "none", "all", "lora_only"), needs=_LORA),
    Dimension("autocast_adapter", (UNSET, *_TRUTH), needs=_LORA),
    Dimension("tokens", (UNSET, "some"), ("one twice", "beyond"), needs=_LORA),
    Dimension("parameters", (UNSET, "experts"), ("unknown",), needs={**_LORA, "architecture": _HAS_EXPERTS}),
    Dimension("bits", (UNSET, "4"), ("8", "5"), needs=_QUANTIZED),
    Dimension("quant_type", (UNSET, "nf4", "fp4"), needs=_QUANTIZED),
    Dimension("double_quant", (UNSET, *_TRUTH), needs=_QUANTIZED),
    Dimension("compute", (UNSET, *_ALL_DTYPES), needs=_QUANTIZED),
    Dimension("storage", (UNSET, *_ALL_DTYPES, "uint8"), needs=_QUANTIZED),
    Dimension("other_targets", (UNSET, "attention"), needs=_OTHER),
    Dimension("other_saved", (UNSET, "norm", "head", "head and embedding"), needs=_OTHER),
    Dimension("optimizer", (UNSET, "AdamW", "RAdam", "SGD")),
    Dimension("weight_decay", (UNSET, "0.1")),
    Dimension("clipping", (UNSET, "0")),
    Dimension("micro", (UNSET, "1", "2"), ("3",)),
    Dimension("packing", (UNSET, *_TRUTH)),
    Dimension("validation", (UNSET, "some")),
    Dimension("evaluate", (UNSET, "1")),
    Dimension("best", (UNSET, *_TRUTH), needs={"validation": ("some",)}),
    Dimension("best_of_none", (UNSET,), ("true",), needs={"validation": (UNSET,)}),
    Dimension("asynchronous", (UNSET, *_TRUTH)),
    Dimension("merge", (UNSET, *_TRUTH)),
    Dimension("merge_dtype", (UNSET, *_ALL_DTYPES), needs=_MERGED),
    Dimension("merge_base", (UNSET, "Original"), ("Dequantized", "Quantized", "Trained"), needs={**_MERGED, **_UNQUANTIZED}),
    Dimension("merge_base_packed", (UNSET, "Original", "Dequantized"), ("Quantized", "Trained"), needs={**_MERGED, **_QUANTIZED}),
)
BY_NAME = {dimension.name: dimension for dimension in DIMENSIONS}
USUAL = {
    "method": "LoRA",
    "architecture": "llama",
    "stored": "bfloat16",
    "ranks": "2",
    "r": "4",
}
"""What stands where nothing else is drawn; every other dimension is unset."""
