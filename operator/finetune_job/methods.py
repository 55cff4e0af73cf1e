"""The table of fine-tuning methods: which PEFT method each is, where its settings are, and what it can do here.

Rules, plan, trainer and documentation read it; nothing else says what a method can do. Its content was measured with PEFT
0.21.2 in this trainer (tests/unit/finetune_trainer/model/test_adapters_every_method.py): a supported method lowers the loss,
gives every trained parameter a gradient, ends on the same weights on any number of ranks, resumes to the same bytes, and writes
an adapter that PEFT loads with every tensor equal and the same logits. One that merges gives every tensor the bits of PEFT's own
merge (tests/unit/finetune_trainer/merge/test_non_lora.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from finetune_job.api.method import MethodType

INSIDE_PEFT = "base_model.model."
"""How the names of a base's modules begin in a model that PEFT has put adapters on, and in the files of adapters."""


class Family(Enum):
    """Where a method's settings are."""

    FULL = "method"
    """No adapter, no settings."""
    LORA = "method.lora"
    OTHER = "method.settings"


@dataclass(frozen=True)
class MergeSetting:
    """A setting of a method that decides whether its adapter can be merged."""

    name: str
    """As `method.settings` has it."""
    peft_name: str
    value: bool | str
    """What it has to be; a fraction is a string."""
    is_default: bool
    """Whether PEFT's own default is that value."""
    reason: str


@dataclass(frozen=True)
class OneRankSetting:
    """A setting that several ranks cannot follow, if it is true or above zero."""

    name: str
    """As `method.settings` has it."""
    reason: str


@dataclass(frozen=True)
class Needs:
    """What a method needs of the trainer beyond what every adapter needs."""

    trains_leaves: bool = False
    """Whether all it trains are leaf modules with a weight, which PEFT's wrap policy can make FSDP units of their own."""
    trains_base_modules: bool = False
    """Whether what it trains are copies of whole modules of the base, which a merge puts in their place."""
    magnitudes: bool = False
    """Whether it trains magnitudes of about 1, which updates cannot move in 16 bits."""
    reads_adapters_outside_units: bool = False
    """Whether a layer reads the shape and values of adapter weights outside the forward pass of the unit that holds them."""
    leaves_casts_to_autocast: bool = False
    """Whether FSDP 1 must not cast its parameters to 16 bits, so that autocast casts the operands of products instead."""
    computes_with_buffers: bool = False
    """Whether it multiplies by buffers, such as random projections, which FSDP 2 does not cast: autocast does."""
    overflows_float16: bool = False
    """Whether its layers need float32 if the rest of the model computes in float16."""
    decomposes_base: bool = False
    """Whether it decomposes the base's weights wherever the adapter is loaded, so that they may not be rounded for the
    training."""
    one_rank_settings: tuple[OneRankSetting, ...] = ()


@dataclass(frozen=True)
class Method:
    """What a method is and can do."""

    family: Family
    peft_type: str | None
    """PEFT's name; None: no adapter."""
    targets_all_linear: bool = True
    """Whether it adapts every linear layer where the user names no modules; otherwise PEFT's own choice for the model."""
    merge_settings: tuple[MergeSetting, ...] = ()
    """What a merge needs of the settings."""
    one_unit: str = ""
    """Why its layers cannot be FSDP units of their own, so that every rank gathers the whole model; empty: they can."""
    refused: str = ""
    """Why it is not supported at all; empty: it is, and its adapter can be merged into the base, or needs no merge."""
    packs_base: bool = False
    """Whether the base is quantised while it trains."""
    needs: Needs = Needs()

    @property
    def attaches_to_values(self) -> bool:
        """Whether its first values may follow from the base's: then every rank loads the whole base before it is sharded."""
        return self.family is Family.OTHER

    def one_rank_setting(self, settings: Mapping[str, Any]) -> OneRankSetting | None:
        """The first setting that several ranks cannot follow. `settings`: by name, with defaults, as `effective_settings`
        gives.
        """
        return next((each for each in self.needs.one_rank_settings if (settings.get(each.name) or 0) > 0), None)


_SHARED = "its layers share one trained parameter, which two FSDP units cannot both hold"
_PROMPT = (
    "it puts virtual tokens before each sequence, which shift the labels, and which only the first of the documents packed "
    "into a sequence would see"
)
_PREFIX = (
    "it puts virtual tokens before the keys of each sequence, which only the first of the documents packed into it would see"
)
_OWN_ATTENTION = (
    "it replaces the model's attention by code of PEFT's own, which there is for Llama, Mistral and GPT-2 alone, and which no "
    "weights can stand for: its adapter cannot be merged"
)


def _other(kind: MethodType, *, targets_all_linear: bool = True, one_unit: str = "", refused: str = "") -> Method:
    return Method(
        Family.OTHER,
        kind.name,
        targets_all_linear=targets_all_linear,
        merge_settings=_MERGE_SETTINGS.get(kind, ()),
        one_unit=one_unit,
        refused=refused,
        needs=_NEEDS.get(kind, Needs()),
    )


_DROPS_MODULES = OneRankSetting(
    "moduleDropout",
    "each rank drops other modules, so they have gradients of different parameters to add up: under FSDP 2 the sums have "
    "different lengths and the gang breaks; under FSDP 1 a unit whose modules are all dropped breaks it",
)
_CONSTRAINED = OneRankSetting(
    "coft",
    "it changes the parameters themselves in each forward pass: FSDP 2 loses the change with the gathered copy and ends on other "
    'weights than one rank, FSDP 1 stops ("a view and its base or another view of its base has been modified inplace")',
)
_NEEDS = {
    MethodType.LOHA: Needs(one_rank_settings=(_DROPS_MODULES,)),
    MethodType.LOKR: Needs(one_rank_settings=(_DROPS_MODULES,)),
    MethodType.OFT: Needs(trains_leaves=True, one_rank_settings=(_CONSTRAINED,)),
    MethodType.PSOFT: Needs(trains_leaves=True, decomposes_base=True),
    MethodType.LN_TUNING: Needs(trains_leaves=True, trains_base_modules=True),
    MethodType.DELORA: Needs(computes_with_buffers=True, overflows_float16=True),
    **dict.fromkeys(
        (MethodType.VERA, MethodType.PVERA, MethodType.TINYLORA, MethodType.UNILORA), Needs(computes_with_buffers=True)
    ),
}
_MERGE_SETTINGS = {
    MethodType.SUPERTUNING: (
        MergeSetting(
            "savePrecomputedIndices",
            "save_precomputed_indices",
            value=True,
            is_default=True,
            reason="without it the adapter does not say which weights it changes; PEFT computes that again from the base's "
            "weights, and in another element type chooses others",
        ),
    ),
    MethodType.UNILORA: (
        MergeSetting(
            "saveIndices",
            "save_indices",
            value=True,
            is_default=False,
            reason="without it the adapter does not say which of the shared values a layer uses; PEFT draws that for all at once",
        ),
    ),
    MethodType.TINYLORA: (
        MergeSetting(
            "weightTying",
            "weight_tying",
            value="1",
            is_default=False,
            reason="otherwise the adapter does not say which of its vectors belongs to which layer: they are numbered in the "
            "order in which the model's code makes its layers",
        ),
        MergeSetting(
            "saveProjection",
            "save_projection",
            value=True,
            is_default=True,
            reason="without it PEFT draws a layer's projection by its number, which the adapter does not hold",
        ),
    ),
    MethodType.WAVEFT: (
        MergeSetting(
            "proportionalParameters",
            "proportional_parameters",
            value=False,
            is_default=True,
            reason="the number of a layer's values then follows from the sizes of all adapted layers together",
        ),
    ),
}
_DORA = Needs(trains_leaves=True, magnitudes=True, reads_adapters_outside_units=True, leaves_casts_to_autocast=True)
METHODS: dict[MethodType, Method] = {
    MethodType.LORA: Method(Family.LORA, "LORA", needs=Needs(trains_leaves=True)),
    # Packed weights are flattened with what is held next to them and are no numbers; autocast leaves them as they are.
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
            MethodType.FOURIERFT,
            MethodType.MISS,
            MethodType.HIRA,
            MethodType.SHIRA,
            MethodType.C3A,
            MethodType.WAVEFT,
            MethodType.DELORA,
            MethodType.GRALORA,
            MethodType.ROAD,
            MethodType.GLORA,
            MethodType.PVERA,
            MethodType.PSOFT,
            MethodType.PEANUT,
            MethodType.SUPERTUNING,
            MethodType.DEFT,
        )
    },
    **{
        kind: _other(kind, targets_all_linear=False)
        for kind in (MethodType.IA3, MethodType.LN_TUNING, MethodType.BEFT, MethodType.TRAINABLE_TOKENS)
    },
    **{kind: _other(kind, one_unit=_SHARED) for kind in (MethodType.VBLORA, MethodType.UNILORA, MethodType.TINYLORA)},
    **{
        kind: _other(kind, refused=_PROMPT)
        for kind in (
            MethodType.PROMPT_TUNING,
            MethodType.MULTITASK_PROMPT_TUNING,
            MethodType.P_TUNING,
            MethodType.CPT,
        )
    },
    **{kind: _other(kind, refused=_PREFIX) for kind in (MethodType.PREFIX_TUNING, MethodType.CARTRIDGE)},
    MethodType.ADAPTION_PROMPT: _other(MethodType.ADAPTION_PROMPT, refused=_OWN_ATTENTION),
    MethodType.ADALORA: _other(
        MethodType.ADALORA,
        refused="after every step it moves ranks between layers, with a state of its own that no checkpoint holds; without that "
        "its matrices stay at their first rank",
    ),
    MethodType.XLORA: _other(
        MethodType.XLORA, refused="it mixes adapters that have already been trained, and computes every batch twice"
    ),
    # Its gradients are not those of a document alone, by up to a tenth of their norm: tests/sweep, with and without packing.
    MethodType.LILY: _other(
        MethodType.LILY,
        refused="its layers choose among their matrices by the mean over all tokens of a batch: a document is computed with what "
        "is packed or padded next to it, and with its own later tokens, which are not there when the model generates",
    ),
    # Measured with 8 layers of 1024 x 1024 random float32 weights.
    MethodType.FROD: _other(
        MethodType.FROD,
        refused="its file lacks the matrices that belong to its projections: PEFT makes them again from the base's weights "
        "wherever "
        "the adapter is loaded, and with two threads instead of one they come out so different that the weights are off by 9 %",
    ),
    MethodType.RANDLORA: _other(
        MethodType.RANDLORA, refused="its weights after a few steps depend on the number of ranks, by far more than rounding"
    ),
    MethodType.OSF: _other(
        MethodType.OSF,
        refused="it projects each gradient with the whole matrix, of which a rank has a part: two ranks end elsewhere than one",
    ),
    MethodType.ADAMSS: _other(
        MethodType.ADAMSS, refused="it clusters the weights with scikit-learn, which the trainer image does not have"
    ),
    MethodType.SHADOW: _other(
        MethodType.SHADOW, refused="it hands other objects than tensors from layer to layer, which losses and FSDP cannot read"
    ),
    MethodType.POLY: _other(MethodType.POLY, refused="it wants the number of a task with each record, which records do not have"),
}
"""Every method that a manifest can name."""


PACKING = [str(kind) for kind, method in METHODS.items() if method.packs_base]
"""Methods that train on a quantised base."""


def lora_kind(*, packs_base: bool, magnitudes: bool) -> MethodType:
    """LoRA, QLoRA, DoRA or QDoRA."""
    return next(
        kind
        for kind, method in METHODS.items()
        if method.family is Family.LORA and (method.packs_base, method.needs.magnitudes) == (packs_base, magnitudes)
    )


def supported(family: Family) -> list[MethodType]:
    """The methods of a family that are not refused, in the table's order."""
    return [kind for kind, method in METHODS.items() if method.family is family and not method.refused]
