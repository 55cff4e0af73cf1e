"""PEFT's own code on torch's meta device, where the first values of adapters cost neither time nor memory.

BOFT computes with values before it knows its tensors; it gets functions that know the shapes alone.
Called by preflight, which attaches a whole model's adapters, and by the merge's planner, for the tensors of one module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from peft.tuners.boft import layer as boft
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


def _boft_matrix(_: boft.BOFTLayer, permutation: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(permutation), len(permutation))


@contextmanager
def initialised_by_shape() -> Iterator[None]:
    """Within: PEFT makes these methods' tensors by their shapes alone. On the meta device only."""
    # Its answer is the same for each layer, and a failed search for a compiler costs time in each.
    compiled = cache(boft.get_fbd_cuda)
    with ExitStack() as stack:
        for owner, name, by_shape in (
            (boft.BOFTLayer, "perm2mat", _boft_matrix),
            (boft, "get_fbd_cuda", compiled),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, by_shape)
        yield
