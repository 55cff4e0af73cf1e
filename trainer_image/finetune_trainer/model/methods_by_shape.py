"""Methods of PEFT that compute with values before they know their tensors: what says for each how large these are without a value.

For a large model the values would take hours and more memory than a machine has: a permutation of all places of each matrix
(SHiRA), permutations written as matrices (BOFT), an index for every value of all adapters (UniLoRA). Names, shapes and element
types are PEFT's: compared with what it makes of a small model (tests/unit/trainer_preflight/test_valueless.py). Called by
without_values.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from peft.tuners.boft import layer as boft
from peft.tuners.shira import config as shira
from peft.tuners.tuners_utils import _get_in_out_features
from peft.tuners.unilora.model import UniLoraModel
from torch import nn


class Places:
    """Stands for a matrix of truth values of which only the number of true ones is known: what `torch.where` makes of it."""

    def __init__(self, count: int) -> None:
        self.count = count

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Places:  # type: ignore[override]
        return self

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.where:
            return NotImplemented
        # What is set to be the device outside does not count in here.
        return tuple(torch.empty(args[0].count, dtype=torch.int64, device="meta") for _ in range(2))


def _shira_mask(layer: nn.Module, r: int, **_: Any) -> Places:
    """As many places of the weight as a LoRA adapter of rank `r` has values."""
    return Places(r * sum(_get_in_out_features(layer)))


def _boft_matrix(_: boft.BOFTLayer, permutation: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(permutation), len(permutation))


def _unilora_scales(model: UniLoraModel, adapter: str) -> None:
    """Indices have their shapes from the start; the scales have theirs."""
    for layer in model._iter_unilora_layers():  # noqa: SLF001 - what stands in for it does as it does
        if adapter in layer.unilora_indices_A and adapter in layer.unilora_indices_B:
            made = [
                torch.empty_like(each[adapter], dtype=torch.float32) for each in (layer.unilora_indices_A, layer.unilora_indices_B)
            ]
            layer.update_scaling(adapter, *made)


@contextmanager
def known_by_shape() -> Iterator[None]:
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
