"""PEFT's own code on torch's meta device, where the first values of adapters cost neither time nor memory.

Some methods compute with values before they know their tensors; these get functions that know the shapes alone.
Called by preflight, which attaches a whole model's adapters, and by the merge's planner, for the tensors of one module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from peft.tuners.boft import layer as boft
from peft.tuners.shira import config as shira
from peft.tuners.tuners_utils import _get_in_out_features
from peft.tuners.unilora.model import UniLoraModel
from torch import nn
from torch.overrides import TorchFunctionMode

META = "meta"
_MOVES = frozenset({"to", "cpu", "cuda"})


class MetaDeviceMode(TorchFunctionMode):
    """Everything that is made is on the meta device and stays there, and random numbers are drawn by no generator.

    Some methods draw what they start from with a generator of the CPU, or move it there; the meta device has neither numbers nor
    a generator.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        is_here = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if is_here and getattr(function, "__name__", "") in _MOVES:
            if function.__name__ != "to":
                return args[0]
            args = (args[0], *(META if isinstance(each, torch.device | str) else each for each in args[1:]))
            if named.get("device") is not None:
                named["device"] = META
        return function(*args, **named)


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Within: adapters that PEFT makes have names, shapes and element types alone. Not for several threads at once."""
    with MetaDeviceMode(), initialised_by_shape(), torch.device(META):
        yield


class CountedMask:
    """A matrix of truth values of which only the number of true ones is known, which is all that `torch.where` needs."""

    def __init__(self, count: int) -> None:
        self.count = count

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> CountedMask:  # type: ignore[override]
        return self

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.where:
            return NotImplemented
        # What is set to be the device outside does not count in here.
        return tuple(torch.empty(args[0].count, dtype=torch.int64, device="meta") for _ in range(2))


def _shira_mask(layer: nn.Module, r: int, **_: Any) -> CountedMask:
    """As many places of the weight as a LoRA adapter of rank `r` has values."""
    return CountedMask(r * sum(_get_in_out_features(layer)))


def _boft_matrix(_: boft.BOFTLayer, permutation: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(permutation), len(permutation))


def _unilora_scales(model: UniLoraModel, adapter: str) -> None:
    """Indices have their shapes from the start; the scales have theirs."""
    for layer in model._iter_unilora_layers():  # noqa: SLF001 - what replaces it does as it does
        if adapter in layer.unilora_indices_A and adapter in layer.unilora_indices_B:
            made = [
                torch.empty_like(each[adapter], dtype=torch.float32)
                for each in (layer.unilora_indices_A, layer.unilora_indices_B)
            ]
            layer.update_scaling(adapter, *made)


@contextmanager
def initialised_by_shape() -> Iterator[None]:
    """Within: PEFT makes these methods' tensors by their shapes alone. On the meta device only."""
    # Its answer is the same for each layer, and a failed search for a compiler costs time in each.
    compiled = cache(boft.get_fbd_cuda)
    with ExitStack() as stack:
        for owner, name, by_shape in (
            (shira, "random_mask", _shira_mask),
            (boft.BOFTLayer, "perm2mat", _boft_matrix),
            (boft, "get_fbd_cuda", compiled),
            (UniLoraModel, "_assign_unilora_indices_and_scales", _unilora_scales),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, by_shape)
        yield
