"""The table of fine-tuning methods: the PEFT method of each, the place of its settings, and what this trainer can do with it.

Rules, plan, trainer and documentation all read this table. Its content was measured with PEFT 0.21.2 in this trainer
(tests/unit/finetune_trainer/model/test_adapters_every_method.py): a supported method lowers the loss, gives every trained
parameter a gradient, ends on the same weights on any number of ranks, resumes to the same bytes, and writes an adapter that PEFT
loads with every tensor equal and the same logits. A merge gives every tensor the bits of PEFT's own merge
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
"""Prefix of the names of a base's modules in a model with PEFT's adapters, and in the files of adapters."""


class Family(Enum):
    """The place of a method's settings in a manifest."""

    FULL = "method"
    """Methods without an adapter and without settings."""
    LORA = "method.lora"
    OTHER = "method.settings"


@dataclass(frozen=True)
class OneRankSetting:
    """A setting that does not work on several ranks if it is true or above zero."""

    name: str
    """Name of the setting in `method.settings`."""
    reason: str


@dataclass(frozen=True)
class Needs:
    """Needs of a method beyond those of every adapter."""

    trains_leaves: bool = False
    """Whether it trains only leaf modules with a weight, which PEFT's wrap policy can put into FSDP units of their own."""
    trains_base_modules: bool = False
    """Whether it trains copies of whole modules of the base, which replace these modules in a merge."""
    magnitudes: bool = False
    """Whether it trains magnitudes of about 1, which small updates cannot change in 16 bits."""
    reads_adapters_outside_units: bool = False
    """Whether a layer reads the shape and values of adapter weights outside the forward pass of the unit that holds them."""
    leaves_casts_to_autocast: bool = False
    """Whether FSDP 1 must not cast its parameters to 16 bits, because autocast has to cast the operands of products instead."""
    computes_with_buffers: bool = False
    """Whether it multiplies by buffers, such as random projections, which autocast has to cast because FSDP 2 does not."""
    one_rank_settings: tuple[OneRankSetting, ...] = ()


@dataclass(frozen=True)
class Method:
    """The properties of a method."""

    family: Family
    peft_type: str | None
    """PEFT's name of the method; None if it has no adapter."""
    targets_all_linear: bool = True
    """Whether it adapts every linear layer if the user names no modules; otherwise PEFT chooses the modules by the model."""
    refused: str = ""
    """Why the method is not supported; empty if it is and its adapter, if any, can be merged into the base."""
    packs_base: bool = False
    """Whether the base is quantised while it trains."""
    needs: Needs = Needs()

    @property
    def attaches_to_values(self) -> bool:
        """Whether first values may be computed from the base's: then every rank loads the whole base before it is sharded."""
        return self.family is Family.OTHER

    def one_rank_setting(self, settings: Mapping[str, Any]) -> OneRankSetting | None:
        """Return the first setting that does not work on several ranks. settings: those of `effective_settings`."""
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
    # FSDP 1 would cast packed weights as if they were ordinary numbers, with the flat parameter around them; autocast does not.
    MethodType.QLORA: Method(
        Family.LORA, "LORA", packs_base=True, needs=Needs(trains_leaves=True, leaves_casts_to_autocast=True)
    ),
    # A layer multiplies weights of two units, which FSDP 1 would cast at different times; autocast casts both alike.
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
"""Method -> its properties, for every method that a manifest can name."""


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
