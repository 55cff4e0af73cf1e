"""Settings of `method.settings` that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune_job.api.method import MethodType
from finetune_job.methods import METHODS, Family

_M = MethodType


@dataclass(frozen=True)
class SettingConflict:
    """Settings of a method that contradict each other."""

    methods: tuple[MethodType, ...]
    exists: Callable[[Mapping[str, Any]], bool]
    setting: str
    """The setting that the finding names."""
    message: str
    fix: str
    changes: Mapping[str, Any]
    """New value of each setting; None removes it."""
    examples: tuple[Mapping[str, Any], ...]
    """Examples of settings that contradict each other."""


_LAYERED = tuple(kind for kind, method in METHODS.items() if method.family is Family.OTHER)


SETTING_CONFLICTS: tuple[SettingConflict, ...] = (
    SettingConflict(
        (_M.OFT,),
        lambda has: has["r"] != 0 and has["oftBlockSize"] != 0,
        "r",
        "r is the number of blocks and oftBlockSize (32 if unset) their size: one follows from the other, and PEFT takes one",
        "set the other one to 0",
        {"r": None},
        ({"r": 8}, {"r": 8, "oftBlockSize": 16}),
    ),
    SettingConflict(
        (_M.OFT,),
        lambda has: has["r"] == 0 and has["oftBlockSize"] == 0,
        "oftBlockSize",
        "neither the number nor the size of the blocks is given",
        "set oftBlockSize, such as to 32, or r",
        {"oftBlockSize": None},
        ({"oftBlockSize": 0},),
    ),
    SettingConflict(
        (_M.OFT,),
        lambda has: has["useCayleyNeumann"] and has["numCayleyNeumannTerms"] < 2,
        "numCayleyNeumannTerms",
        "with less than two terms of its series every rotation is the identity, whatever is learnt: the first backward pass "
        "finds no gradient at all",
        "write a whole number of at least 2 (PEFT's default is 5), or set useCayleyNeumann: false",
        {"numCayleyNeumannTerms": None},
        ({"oftBlockSize": 8, "numCayleyNeumannTerms": 1},),
    ),
    SettingConflict(
        (_M.BOFT,),
        lambda has: has["boftBlockSize"] != 0 and has["boftBlockNum"] != 0,
        "boftBlockNum",
        "boftBlockSize (4 where unset) and boftBlockNum follow from each other, and PEFT takes only one",
        "set the other one to 0",
        {"boftBlockNum": None},
        ({"boftBlockNum": 4},),
    ),
    SettingConflict(
        (_M.BOFT,),
        lambda has: has["boftBlockSize"] == 0 and has["boftBlockNum"] == 0,
        "boftBlockSize",
        "neither the size nor the number of the blocks is given",
        "set boftBlockSize, such as to 4, or boftBlockNum",
        {"boftBlockSize": None},
        ({"boftBlockSize": 0},),
    ),
    SettingConflict(
        (_M.HRA,),
        lambda has: has["applyGS"] and has["initWeights"] and has["r"] >= 2 and has["r"] % 2 == 0,
        "applyGS",
        "HRA starts with pairs of equal reflections, which cancel; made orthogonal, the second of each pair is 0 divided by "
        "0, or a remainder of rounding: training starts at noise or NaN",
        "remove applyGS, or set initWeights: false",
        {"applyGS": None},
        ({"r": 4, "applyGS": True},),
    ),
    SettingConflict(
        (_M.IA3,),
        lambda has: (
            isinstance(has["feedforwardModules"], list)
            and isinstance(has["targetModules"], list)
            and not set(has["feedforwardModules"]) <= set(has["targetModules"])
        ),
        "feedforwardModules",
        "feedforwardModules says for which of the adapted modules the input is scaled; a module that targetModules does not "
        "name is not adapted, and PEFT refuses the list",
        "name in feedforwardModules only what targetModules names",
        {"feedforwardModules": []},
        ({"targetModules": ["q_proj"], "feedforwardModules": ["down_proj"]},),
    ),
    SettingConflict(
        _LAYERED,
        lambda has: bool(has.get("layersPattern")) and has.get("layersToTransform") is None,
        "layersPattern",
        "it says where the layers of layersToTransform are counted, but layersToTransform is not set",
        "set layersToTransform, or remove layersPattern",
        {"layersPattern": None},
        ({"layersPattern": "layers", "targetModules": ["q_proj"]},),
    ),
)
"""Every conflict within `method.settings`."""
