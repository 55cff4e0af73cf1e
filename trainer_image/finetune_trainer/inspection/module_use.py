"""What the model does with each of its modules, by name, as it was observed on a small model of the same architecture."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from finetune_trainer.small_models.layers import KeptLayers

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a name that is a number: of a layer, or of an expert."""


@dataclass(frozen=True)
class ModuleUse:
    """Of one module, or of several that are alike, such as the experts of a layer."""

    is_called: bool
    gets_gradient: bool
    """Some parameter of its own; True, too, where it has none."""
    readers: tuple[str, ...] = ()
    """Classes of the modules whose code reads its weight past its forward pass."""
    gives_tensor: bool = True
    """One tensor, rather than several, each time it was called."""
    is_handed_to: tuple[str, ...] = ()
    """Fused kernels, as `package.function`, to which its weight is handed where the package is installed, as it is here."""

    @property
    def is_bypassed(self) -> bool:
        """Whether something else works with its weight."""
        return bool(self.readers or self.is_handed_to)


class ModuleUses:
    """What was observed of each module of the small model."""

    def __init__(self, observed: Mapping[str, ModuleUse], layers: KeptLayers | None) -> None:
        self._layers = layers
        by_layer: dict[str, list[ModuleUse]] = defaultdict(list)
        anywhere: dict[str, list[ModuleUse]] = defaultdict(list)
        for name, use in observed.items():
            by_layer[_alike_in_a_layer(name)].append(use)
            anywhere[_alike(name)].append(use)
        self._by_layer = {name: _together(uses) for name, uses in by_layer.items()}
        self._anywhere = {name: _together(uses) for name, uses in anywhere.items()}

    def of(self, name: str) -> ModuleUse | None:
        """Of the module of this name in the model itself; None where the small model has none like it."""
        return self._by_layer.get(_alike_in_a_layer(self._renumbered(name))) or self._anywhere.get(_alike(name))

    def _renumbered(self, name: str) -> str:
        def twin(found: re.Match[str]) -> str:
            number = self._layers.twin_of(int(found[0])) if self._layers is not None else None
            return found[0] if number is None else str(number)

        return _NUMBER.sub(twin, name, count=1)


def _alike_in_a_layer(name: str) -> str:
    """The name without the numbers after the layer's: what one expert does, another would with other tokens."""
    first, dot, rest = _split_after_number(name)
    return f"{first}{dot}{_NUMBER.sub('*', rest)}"


def _split_after_number(name: str) -> tuple[str, str, str]:
    found = _NUMBER.search(name)
    if found is None:
        return name, "", ""
    return name[: found.end()], name[found.end() : found.end() + 1], name[found.end() + 1 :]


def _alike(name: str) -> str:
    return _NUMBER.sub("*", name)


def _together(uses: list[ModuleUse]) -> ModuleUse:
    return ModuleUse(
        is_called=any(use.is_called for use in uses),
        gets_gradient=any(use.gets_gradient for use in uses),
        gives_tensor=all(use.gives_tensor for use in uses),
        readers=tuple(sorted({reader for use in uses for reader in use.readers})),
        is_handed_to=tuple(sorted({kernel for use in uses for kernel in use.is_handed_to})),
    )
