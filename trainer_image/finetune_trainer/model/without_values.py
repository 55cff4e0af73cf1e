"""PEFT's own code on torch's meta device, where the first values of adapters cost neither time nor memory.

Called by preflight, which attaches a whole model's adapters, and by the merge's planner, which asks for the tensors of one module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from finetune_trainer.model.methods_by_shape import known_by_shape

META = "meta"
_MOVES = frozenset({"to", "cpu", "cuda"})


class Valueless(TorchFunctionMode):
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
def without_values() -> Iterator[None]:
    """Within: adapters that PEFT makes have names, shapes and element types, and nothing else. Not for several threads at once."""
    with Valueless(), known_by_shape(), torch.device(META):
        yield
