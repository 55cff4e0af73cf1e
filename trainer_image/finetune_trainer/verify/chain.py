"""Weights as the next of several adapters finds them: merged with those before it by PEFT's own layers, one module at a time.

PEFT adds adapters one after the other, and some look at what they are added to, so only the last can be left apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from finetune_trainer.verify.hollow import Place, empty_again, hollow_model
from finetune_trainer.verify.weights import StoredWeights


class Weights(Protocol):
    """Where a hollow model's weights come from; see weights.py for what each gives."""

    def whole(self, path: str, dtype: torch.dtype) -> torch.Tensor: ...
    def rows(self, path: str, first: int, last: int, dtype: torch.dtype) -> torch.Tensor: ...
    def some_rows(self, path: str, indices: Iterable[int], dtype: torch.dtype) -> torch.Tensor: ...
    def is_one_tensor(self, path: str) -> bool: ...


class MergedWeights:
    """`weights` with `adapter` merged into them. Raises what the libraries raise."""

    def __init__(self, stored: StoredWeights, weights: Weights, adapter: Path, *, allow_remote_code: bool = False) -> None:
        self._weights = weights
        self._hollow = hollow_model(stored, adapter, allow_remote_code=allow_remote_code)
        self._empty: dict[str, list[Place]] = {}
        for place in self._hollow.places:
            self._empty.setdefault(place.path, []).append(place)

    def whole(self, path: str, dtype: torch.dtype) -> torch.Tensor:
        module, name = self._owner(path)
        if isinstance(module, TrainableTokensWrapper):
            module = module.token_adapter
        if isinstance(module, ModulesToSaveWrapper):
            copy: nn.Module = module.modules_to_save[module.active_adapter]
            return copy.get_parameter(name).detach().to(dtype)
        if not isinstance(module, BaseTunerLayer):
            return self._weights.whole(path, dtype) if path in self._empty else module.get_parameter(name).detach().to(dtype)
        within = {id(part) for part in module.modules()}
        places = [place for found in self._empty.values() for place in found if id(place.module) in within]
        for place in places:
            values = self._weights.whole(place.path, place.dtype)
            place.module._parameters[place.name] = nn.Parameter(values, requires_grad=False)  # noqa: SLF001
        with torch.no_grad():
            module.merge(safe_merge=False)
        merged = _innermost(module).get_parameter(name).detach()
        for layer in module.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.merged_adapters.clear()
        for place in places:
            empty_again(place)
        return merged.to(dtype)

    def rows(self, path: str, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        if self._is_plain(path):
            return self._weights.rows(path, first, last, dtype)
        return self.whole(path, dtype)[first:last].clone()

    def some_rows(self, path: str, indices: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        return self._weights.some_rows(path, indices, dtype)

    def is_one_tensor(self, path: str) -> bool:
        return self._is_plain(path) and self._weights.is_one_tensor(path)

    def _owner(self, path: str) -> tuple[nn.Module, str]:
        owner, _, name = path.rpartition(".")
        return self._hollow.base.get_submodule(owner), name

    def _is_plain(self, path: str) -> bool:
        module, _ = self._owner(path)
        adapted = isinstance(module, BaseTunerLayer | ModulesToSaveWrapper | TrainableTokensWrapper)
        return not adapted and path in self._empty


def _innermost(layer: nn.Module) -> nn.Module:
    while isinstance(layer, BaseTunerLayer):
        layer = layer.base_layer
    return layer
