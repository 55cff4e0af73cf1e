"""The table of fine-tuning methods: each one's PEFT method, where its settings are, and what this trainer supports.

Rules, plan, trainer and documentation all read this table. Its content was tested with PEFT 0.21.2 in this trainer
(tests/unit/finetune_trainer/model/test_adapters_every_method.py): a supported method lowers the loss, gives every trained
parameter a gradient, yields the same weights on any number of ranks, resumes bit for bit, and writes an adapter that PEFT loads
with equal tensors and equal logits. A merge yields the same bits as PEFT's own merge
(tests/unit/finetune_trainer/merge/test_non_lora.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from finetune_job.api.method import MethodType
from finetune_job.unsupported_methods import UNSUPPORTED

INSIDE_PEFT = "base_model.model."
"""Prefix that PEFT adds to the base's module names, in the wrapped model and in adapter files."""


class Family(Enum):
    """Where a manifest has the method's settings."""

    FULL = "method"
    """Methods without an adapter and without settings."""
    LORA = "method.lora"
    OTHER = "method.settings"


@dataclass(frozen=True)
class OneRankSetting:
    """A setting that works only on a single rank if it is true or above zero."""

    name: str
    """Name of the setting in `method.settings`."""
    reason: str


@dataclass(frozen=True)
class Needs:
    """Special requirements of a method, beyond those that all adapters share."""

    trains_leaves: bool = False
    """Whether all trained modules are leaves with a weight, which PEFT's wrap policy can put into FSDP units of their own."""
    trains_base_modules: bool = False
    """Whether the method trains copies of whole base modules, which replace the original modules in a merge."""
    magnitudes: bool = False
    """Whether the method trains magnitudes of about 1: in 16 bits, small updates to them would be rounded away."""
    reads_adapters_outside_units: bool = False
    """Whether a layer reads the shape and values of adapter weights outside the forward pass of the unit that holds them."""
    leaves_casts_to_autocast: bool = False
    """Whether FSDP 1 must not cast the parameters to 16 bits, because autocast has to cast the operands of products instead."""
    computes_with_buffers: bool = False
    """Whether the method multiplies by buffers, such as random projections; autocast must cast these, because FSDP 2 does not."""
    one_rank_settings: tuple[OneRankSetting, ...] = ()


@dataclass(frozen=True)
class Method:
    """The properties of a method."""

    family: Family
    peft_type: str | None
    """PEFT's name of the method; None if it has no adapter."""
    targets_all_linear: bool = True
    """Whether every linear layer is adapted if the user names no modules; otherwise PEFT's defaults for the model apply."""
    refused: str = ""
    """Why the method is not supported; empty if it is supported, which includes merging its adapter, if any, into the base."""
    packs_base: bool = False
    """Whether the base is quantised during training."""
    needs: Needs = Needs()

    @property
    def attaches_to_values(self) -> bool:
        """Whether initial values may be computed from base weights: if so, every rank loads the whole base before sharding."""
        return self.family is Family.OTHER

    def one_rank_setting(self, settings: Mapping[str, Any]) -> OneRankSetting | None:
        """Return the first setting that works only on a single rank. settings: the result of `effective_settings`."""
        return next((setting for setting in self.needs.one_rank_settings if (settings.get(setting.name) or 0) > 0), None)


def _other(kind: MethodType, *, targets_all_linear: bool = True, refused: str = "") -> Method:
    return Method(
        Family.OTHER, kind.name, targets_all_linear=targets_all_linear, refused=refused, needs=_NEEDS.get(kind, Needs())
    )


_DROPS_MODULES = OneRankSetting(
    "moduleDropout",
    "each rank drops other modules, so they have gradients of different parameters to add up: under FSDP 2 the sums have "
    "different lengths and the gang breaks; under FSDP 1 a unit whose modules are all dropped breaks it",
)
_CONSTRAINED = OneRankSetting(
    "coft",
    "it changes the parameters themselves in each forward pass: FSDP 2 loses the change with the gathered copy and ends with "
    'different weights from one rank; FSDP 1 stops ("a view and its base or another view of its base has been modified inplace")',
)
_NEEDS = {
    MethodType.LOHA: Needs(one_rank_settings=(_DROPS_MODULES,)),
    MethodType.LOKR: Needs(one_rank_settings=(_DROPS_MODULES,)),
    MethodType.OFT: Needs(trains_leaves=True, one_rank_settings=(_CONSTRAINED,)),
    MethodType.LN_TUNING: Needs(trains_leaves=True, trains_base_modules=True),
    MethodType.VERA: Needs(computes_with_buffers=True),
}
_DORA = Needs(trains_leaves=True, magnitudes=True, reads_adapters_outside_units=True, leaves_casts_to_autocast=True)
METHODS: dict[MethodType, Method] = {
    MethodType.LORA: Method(Family.LORA, "LORA", needs=Needs(trains_leaves=True)),
    # FSDP 1 would cast a unit's whole flat parameter, and so the packed weights as if they were numbers; autocast does not.
    MethodType.QLORA: Method(
        Family.LORA, "LORA", packs_base=True, needs=Needs(trains_leaves=True, leaves_casts_to_autocast=True)
    ),
    # A layer multiplies weights of two units, which FSDP 1 would cast at different times; autocast casts both together.
    MethodType.DORA: Method(Family.LORA, "LORA", needs=_DORA),
    MethodType.QDORA: Method(Family.LORA, "LORA", packs_base=True, needs=_DORA),
    MethodType.FULL: Method(Family.FULL, None),
    **{
        kind: _other(kind)
        for kind in (
            MethodType.LOHA,
            MethodType.LOKR,
            MethodType.VERA,
            MethodType.OFT,
            MethodType.BOFT,
            MethodType.HRA,
            MethodType.MISS,
        )
    },
    **{
        kind: _other(kind, targets_all_linear=False)
        for kind in (MethodType.IA3, MethodType.LN_TUNING, MethodType.TRAINABLE_TOKENS)
    },
    **{kind: _other(kind, refused=each.reason) for kind, each in UNSUPPORTED.items()},
}
"""Properties of every method that a manifest can name."""


PACKING = [str(kind) for kind, method in METHODS.items() if method.packs_base]
"""Methods that train on a quantised base."""


def lora_kind(*, packs_base: bool, magnitudes: bool) -> MethodType:
    """Return LoRA, QLoRA, DoRA or QDoRA, whichever has these two properties."""
    return next(
        kind
        for kind, method in METHODS.items()
        if method.family is Family.LORA and (method.packs_base, method.needs.magnitudes) == (packs_base, magnitudes)
    )


def supported(family: Family) -> list[MethodType]:
    """List the methods of a family that are not refused, in the table's order."""
    return [kind for kind, method in METHODS.items() if method.family is family and not method.refused]
