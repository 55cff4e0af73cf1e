"""The layers of a model that its scaled-down copy keeps: the fewest that include every kind of layer, and at least two."""

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
"""A per-layer number with more distinct values than this does not distinguish kinds of layers."""
MOST = 12
"""Maximum number of layers that are kept, even if a kind of layer is lost."""


@dataclass(frozen=True)
class KeptLayers:
    """Layers of the model that the small one keeps, in order."""

    kept: tuple[int, ...]
    kinds: tuple[str, ...]
    """The kind of each layer of the model."""

    @property
    def count(self) -> int:
        return len(self.kept)

    def kept_layer_of(self, layer: int) -> int | None:
        """Return the small model's index of this layer, or of a similar kept layer; None if the model has no such layer."""
        if not 0 <= layer < len(self.kinds):
            return None
        if layer in self.kept:
            return self.kept.index(layer)
        alike = [number for number, kept in enumerate(self.kept) if self.kinds[kept] == self.kinds[layer]]
        return alike[0] if alike else min(layer, self.count - 1)


def layer_count(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers of this part of a model."""
    for name, value in config.items():
        if MEANING_OF.get(name) is Meaning.LAYERS and isinstance(value, int) and value > 0:
            return value
    return None


def choose_layers(config: Mapping[str, Any], of_each_kind: int = 1) -> KeptLayers | None:
    """Choose the layers to keep in one part of a model; None if its configuration does not state how many it has."""
    count = layer_count(config)
    if count is None:
        return None
    columns = [by_layer for name, value in config.items() if (by_layer := _of_layers(name, value, count)) is not None]
    # Layers are of the same kind if their settings, as JSON, are equal.
    kinds = tuple(json.dumps([column[layer] for column in columns], default=str) for layer in range(count))
    period = _longest_period(config)
    kept: list[int] = []
    for layer, kind in enumerate(kinds):
        if sum(kinds[number] == kind for number in kept) < of_each_kind:
            kept.append(layer)
    if period > 1:
        # A feature of every n-th layer appears only if all of the first n layers are kept.
        kept = list(range(min(count, max(period, kept[-1] + 1))))
    for layer in range(count):
        if len(kept) >= min(FEWEST, count):
            break
        if layer not in kept:
            kept.append(layer)
    return KeptLayers(tuple(sorted(kept)[:MOST]), kinds)


def cut_layers(config: Mapping[str, Any], layers: KeptLayers) -> dict[str, Any]:
    """Reduce the fields that describe individual layers to the kept layers, and return the fields that change."""
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
        elif (by_layer := _of_layers(name, value, count)) is not None:
            of_kept = [by_layer[layer] for layer in layers.kept]
            if isinstance(value, list):
                changed[name] = [[[kind], 1] for kind in of_kept]
            elif name not in LAST_INDEX:
                changed[name] = sum(of_kept)
            elif value >= 0:
                changed[name] = max(sum(of_kept) - 1, 0)
    return {name: value for name, value in changed.items() if value != config[name]}


def is_per_layer(value: Any, count: int) -> bool:
    """Whether a list has one element for each layer."""
    return isinstance(value, list) and len(value) == count > 1 and not isinstance(value[0], list)


def is_by_layer(name: str, value: Any) -> bool:
    """Whether a field maps indices of layers to settings."""
    return "layer" in name and isinstance(value, Mapping) and bool(value) and all(str(key).isdigit() for key in value)


def holds_layer_numbers(name: str, value: Any, count: int) -> bool:
    """Whether a field is a list of indices of layers."""
    if not isinstance(value, list) or LAYER_INDICES.search(name) is None:
        return False
    are_numbers = all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < count for number in value)
    return are_numbers and all(first < second for first, second in pairwise(value))


def _of_layers(name: str, value: Any, count: int) -> list[Any] | None:
    """Return what a field says about each layer, in order; None if it says nothing about individual layers."""
    layers = range(count)
    if is_by_layer(name, value):
        return [next((own for key, own in value.items() if int(key) == layer), None) for layer in layers]
    if holds_layer_numbers(name, value, count):
        return [layer in value for layer in layers]
    if is_per_layer(value, count):
        # Layers with many different sizes would each be a kind of their own, so only zero and nonzero are distinguished.
        return [size == 0 for size in value] if _is_size(value) else list(value)
    if name == "attention_types" and isinstance(value, list):
        # GPT-Neo's `[[["global", "local"], 12]]`.
        return [kind for kinds, times in value for kind in kinds * times]
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if name in FIRST_LAYERS:
        return [layer < value for layer in layers]
    if name in LAST_LAYERS:
        return [layer >= count - value for layer in layers]
    return [layer <= value for layer in layers] if name in LAST_INDEX else None


def _is_size(values: list[Any]) -> bool:
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return are_numbers and len(set(values)) > MOST_KINDS


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
