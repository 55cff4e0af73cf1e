"""Runs PEFT's own code on torch's meta device, where initial values of adapters cost no time or memory.

BOFT computes with values while it creates its tensors, so two of its functions are replaced by ones that need only shapes.
Preflight uses this to attach a whole model's adapters, and the merge's planner to get the tensors of one module.
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
    """A mode in which new tensors are on the meta device and stay there, and random numbers need no generator.

    Some methods use a CPU generator for initial values or move them to the CPU; the meta device has neither values nor a
    generator.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        is_here = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if is_here and getattr(function, "__name__", "") in _MOVES:
            if function.__name__ != "to":
                return args[0]
            args = (args[0], *(META if isinstance(argument, torch.device | str) else argument for argument in args[1:]))
            if named.get("device") is not None:
                named["device"] = META
        return function(*args, **named)


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Make PEFT build adapters in the body with only names, shapes and element types. Only one thread may do so at a time."""
    with MetaDeviceMode(), initialised_by_shape(), torch.device(META):
        yield


def _boft_matrix(_: boft.BOFTLayer, permutation: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(permutation), len(permutation))


@contextmanager
def initialised_by_shape() -> Iterator[None]:
    """Make PEFT build BOFT's tensors in the body from shapes alone. Use this only on the meta device."""
    # Cached, because the result is the same for every layer, and each failed search for a compiler takes time.
    compiled = cache(boft.get_fbd_cuda)
    with ExitStack() as stack:
        for owner, name, by_shape in ((boft.BOFTLayer, "perm2mat", _boft_matrix), (boft, "get_fbd_cuda", compiled)):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, by_shape)
        yield
