"""Limits on the values of method settings, beyond their names and types.

Each limit was tested with PEFT 0.21.2 on a small Llama (tests/pitfalls/test_method_settings.py runs all tests): with other values
PEFT raises an error once the model is loaded, or silently trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune_job.api.method import MethodType


@dataclass(frozen=True)
class SettingLimit:
    """A limit on the values of settings."""

    settings: tuple[str, ...]
    accepts: Callable[[Any], bool]
    wanted: str
    """The accepted values, worded to follow "write"."""
    otherwise: str
    """The effect of other values in PEFT."""
    methods: tuple[MethodType, ...] = ()
    """Methods with this limit; if empty, it applies to every method that has the setting."""
    examples: tuple[Any, ...] = ()
    """Examples of refused values."""

    def applies_to(self, method: MethodType, setting: str) -> bool:
        """Whether this limit applies to the setting of that method."""
        return setting in self.settings and (not self.methods or method in self.methods)


def _each(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(accepts(item) for item in value.values())


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or isinstance(value, float)


def _positive(value: Any) -> bool:
    return value is None or value > 0


def _not_zero(value: Any) -> bool:
    return value is None or value != 0


def _layers(value: Any) -> bool:
    return value is None or all(number >= 0 for number in (value if isinstance(value, list) else [value]))


_M = MethodType
_NOTHING_LEARNT = "no error: the adapter changes nothing and gets no gradient"
_RAISES = "PEFT refuses it once the model is loaded"
DROPOUTS = ("rankDropout", "moduleDropout", "veraDropout", "boftDropout", "missDropout")
_ANY_BIAS = (_M.VERA, _M.BOFT, _M.HRA, _M.MISS)
"""Methods whose `bias` PEFT declares as an arbitrary string; besides their own `..._only` value they accept `lora_only`."""


def _bias_limit(kind: MethodType) -> SettingLimit:
    words = ("none", "all", "lora_only", f"{kind.name.lower()}_only")
    return SettingLimit(("bias",), lambda value: value in words, f"none, all or {words[-1]}", _RAISES, (kind,), ("some",))


SETTING_LIMITS: tuple[SettingLimit, ...] = (
    SettingLimit(("r",), lambda value: value >= 0, "0 (not used) or a whole number above it", _RAISES, (_M.OFT,), (-1,)),
    SettingLimit(
        ("r",),
        _positive,
        "a whole number above 0",
        f"{_RAISES}, or trains an adapter of size 0",
        tuple(kind for kind in MethodType if kind is not _M.OFT),
        (0,),
    ),
    SettingLimit(
        DROPOUTS,
        lambda value: 0 <= value < 1,
        'a probability below 1, such as "0.1"',
        "at 1 the adapter sees nothing and learns nothing, or what is left over is divided by zero; above 1 PEFT refuses it",
        examples=("1",),
    ),
    SettingLimit(("alpha",), _not_zero, "a number other than 0", _NOTHING_LEARNT, (_M.LOHA, _M.LOKR), (0,)),
    SettingLimit(("dInitial",), _not_zero, "a number other than 0", _NOTHING_LEARNT, (_M.VERA,), ("0",)),
    SettingLimit(
        ("oftBlockSize",),
        lambda value: value == 0 or value >= 2,
        "a whole number of at least 2, or 0 where r is given",
        "PEFT accepts 1, but a block of one channel cannot rotate, and the adapter has size 0; it refuses values below 0",
        examples=(1,),
    ),
    SettingLimit(
        ("boftBlockSize",),
        lambda value: value == 0 or value >= 2,
        "a whole number of at least 2, or 0 where boftBlockNum is given",
        "PEFT accepts 1, but a block of one channel cannot rotate, so only the scales are trained; it refuses values below 0",
        examples=(1,),
    ),
    SettingLimit(("boftBlockNum",), lambda value: value >= 0, "0 (not used) or a whole number above it", _RAISES, examples=(-1,)),
    SettingLimit(
        ("boftNButterflyFactor",),
        lambda value: value == 1,
        "1",
        "no error: without a compiler for its CUDA extension PEFT takes 1, and the adapter's settings still say otherwise",
        examples=(2,),
    ),
    *(_bias_limit(kind) for kind in _ANY_BIAS),
    SettingLimit(
        ("layersToTransform",),
        _layers,
        "numbers of layers, from 0",
        "PEFT finds no such layer, or leaves it out",
        examples=([-1],),
    ),
    SettingLimit(
        ("rankPattern",),
        _each(lambda item: _whole(item) and item > 0),
        "a mapping of names to whole numbers above 0",
        _RAISES,
        examples=({"q_proj": 0}, {"q_proj": "4"}, None),
    ),
    SettingLimit(
        ("alphaPattern",),
        _each(lambda item: _number(item) and item != 0),
        "a mapping of names to whole numbers other than 0",
        f"{_RAISES}; at 0 the layer learns nothing",
        examples=({"q_proj": 0}, None),
    ),
    SettingLimit(
        ("tokenIndices",),
        lambda value: bool(value) and min(value) >= 0 and len(set(value)) == len(value),
        "the ids of the tokens to train, each once",
        "without ids nothing can be trained and the first pass fails; an id below 0 also fails there; if an id is given "
        "twice, two copies of its row are trained, and which of them counts is not defined",
        examples=([3, 3],),
    ),
    SettingLimit(
        ("targetModules",),
        lambda value: value not in ("", []),
        "names of modules, or all-linear",
        "PEFT finds nothing to adapt",
        examples=([],),
    ),
    SettingLimit(
        ("modulesToSave",),
        lambda value: not isinstance(value, str),
        "a list of names",
        "PEFT also allows a string, and takes it apart: every module whose name ends in one of its letters would be trained "
        "whole",
        (_M.LN_TUNING,),
        ("lm_head",),
    ),
)
"""All limits of settings."""
