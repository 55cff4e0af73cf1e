"""Which layers of a model its scaled-down copy keeps: the fewest that have every kind of layer, and at least two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from finetune_trainer.small_models.fields import (
    EXPLAINED_BY_TYPES,
    FIRST_LAYERS,
    LAST_INDEX,
    LAST_LAYERS,
    LAYER_INDICES,
    MEANING_OF,
    PERIODS,
    Meaning,
)

FEWEST = 2
MOST_KINDS = 4
"""Numbers that take more values than that over the layers make no kinds of layers."""
MOST = 12
"""More layers than that are kept of no model, even where a kind of layer is lost."""


@dataclass(frozen=True)
class KeptLayers:
    """Layers of the model that the small one has, in order."""

    kept: tuple[int, ...]
    kinds: tuple[str, ...]
    """Of each layer of the model."""

    @property
    def count(self) -> int:
        return len(self.kept)

    def kept_layer_of(self, layer: int) -> int | None:
        """Number in the small model of a layer of the same kind; the layer's own where it is kept. None: the model has no such
        layer.
        """
        if not 0 <= layer < len(self.kinds):
            return None
        if layer in self.kept:
            return self.kept.index(layer)
        alike = [number for number, kept in enumerate(self.kept) if self.kinds[kept] == self.kinds[layer]]
        return alike[0] if alike else min(layer, self.count - 1)


def layer_count(config: Mapping[str, Any]) -> int | None:
    """Layers of this part of a model."""
    for name, value in config.items():
        if MEANING_OF.get(name) is Meaning.LAYERS and isinstance(value, int) and value > 0:
            return value
    return None


def choose_layers(config: Mapping[str, Any], of_each_kind: int = 1) -> KeptLayers | None:
    """The layers to keep of one part of a model; None where it does not say how many it has."""
    count = layer_count(config)
    if count is None:
        return None
    kinds = tuple(_kind(config, layer, count) for layer in range(count))
    period = _longest_period(config)
    kept: list[int] = []
    for layer, kind in enumerate(kinds):
        if sum(kinds[number] == kind for number in kept) < of_each_kind:
            kept.append(layer)
    if period > 1:
        # What happens every so many layers needs all layers up to there.
        kept = list(range(min(count, max(period, kept[-1] + 1))))
    for layer in range(count):
        if len(kept) >= min(FEWEST, count):
            break
        if layer not in kept:
            kept.append(layer)
    return KeptLayers(tuple(sorted(kept)[:MOST]), kinds)


def cut_layers(config: Mapping[str, Any], layers: KeptLayers) -> dict[str, Any]:
    """The fields that speak of single layers, for the kept ones."""
    count = len(layers.kinds)
    changed: dict[str, Any] = {}
    for name, value in config.items():
        if MEANING_OF.get(name) is Meaning.LAYERS and value == count:
            changed[name] = layers.count
        elif is_by_layer(name, value):
            changed[name] = {str(layers.kept.index(int(key))): own for key, own in value.items() if int(key) in layers.kept}
        elif holds_layer_numbers(name, value, count):
            changed[name] = [number for number, layer in enumerate(layers.kept) if layer in value]
        elif is_per_layer(value, count):
            changed[name] = [value[layer] for layer in layers.kept]
        elif name == "attention_types" and isinstance(value, list):
            changed[name] = [[[kind], 1] for kind in (_expanded(value)[layer] for layer in layers.kept)]
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif name in FIRST_LAYERS:
            changed[name] = sum(layer < value for layer in layers.kept)
        elif name in LAST_LAYERS:
            changed[name] = sum(layer >= count - value for layer in layers.kept)
        elif name in LAST_INDEX and value >= 0:
            changed[name] = max(sum(layer <= value for layer in layers.kept) - 1, 0)
    return {name: value for name, value in changed.items() if value != config[name]}


def is_per_layer(value: Any, count: int) -> bool:
    """Whether a list holds one thing for each layer."""
    return isinstance(value, list) and len(value) == count and count > 1 and not _is_pattern(value)


def is_by_layer(name: str, value: Any) -> bool:
    """Whether a mapping holds settings of single layers by their numbers."""
    return "layer" in name and isinstance(value, Mapping) and bool(value) and all(str(key).isdigit() for key in value)


def holds_layer_numbers(name: str, value: Any, count: int) -> bool:
    """Whether a list names single layers."""
    if not isinstance(value, list) or LAYER_INDICES.search(name) is None:
        return False
    are_numbers = all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < count for number in value)
    return are_numbers and all(one < next_one for one, next_one in pairwise(value))


def _is_pattern(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], list)


def _kind(config: Mapping[str, Any], layer: int, count: int) -> str:
    """A text that is the same for layers that are alike."""
    parts: list[Any] = []
    for name, value in config.items():
        if is_by_layer(name, value):
            parts.append(next((own for key, own in value.items() if int(key) == layer), None))
        elif holds_layer_numbers(name, value, count):
            parts.append(layer in value)
        elif is_per_layer(value, count):
            # Sizes that grow from layer to layer make no kinds of their own.
            parts.append(value[layer] if not _is_size(value) else value[layer] == 0)
        elif name == "attention_types" and isinstance(value, list):
            parts.append(_expanded(value)[layer])
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif name in FIRST_LAYERS:
            parts.append(layer < value)
        elif name in LAST_LAYERS:
            parts.append(layer >= count - value)
        elif name in LAST_INDEX:
            parts.append(layer <= value)
    return json.dumps(parts, default=str)


def _is_size(values: list[Any]) -> bool:
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return are_numbers and len(set(values)) > MOST_KINDS


def _expanded(attention_types: list[Any]) -> list[Any]:
    """GPT-Neo's `[[["global", "local"], 12]]`, layer by layer."""
    return [kind for kinds, times in attention_types for kind in kinds * times]


def _longest_period(config: Mapping[str, Any]) -> int:
    has_types = any(name in config and config[name] for name in ("layer_types", "layers_block_type"))
    longest = 1
    for name, offset in PERIODS.items():
        period = config.get(name)
        if not isinstance(period, int) or isinstance(period, bool) or (has_types and name in EXPLAINED_BY_TYPES):
            continue
        first = config.get(offset) if offset else None
        longest = max(longest, period, (first if isinstance(first, int) else 0) + 1 if period > 1 else 1)
    return longest
