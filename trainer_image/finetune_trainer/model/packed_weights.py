"""Packed layers of bitsandbytes 0.50, made fit for training: all three faults give wrong numbers without a word.

A layer puts its bias into the element type of its input for good, in memory of its own: a bias that is trained stays in memory
that nothing updates, because sharding gathers it into another. And 4-bit layers on a CPU: a forward pass without gradients in
evaluation mode packs the weights again for a faster kernel, for good: whatever trains afterwards unpacks them as if nothing had
happened. And the kernel that unpacks weights (AVX-512) takes each row for the start of a block of 64 values, although blocks run
on from row to row: wrong wherever 64 does not divide the width of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

_UNPACK = "dequantize_4bit"


def is_to_be_packed(layer: nn.Module) -> bool:
    """Whether this is a 4-bit layer whose weight is still to come."""
    # Asked by its attribute: what packs nothing does not import bitsandbytes.
    return getattr(layer, "quant_state", layer) is None and getattr(layer.weight, "quant_state", None) is None


def make_fit_for_training(model: nn.Module, device: torch.device) -> None:
    """Fix all three in the packed layers of `model`, which is to be trained on `device`."""
    keep_biases(model)
    if device.type == "cpu":
        fix_cpu_unpacking(model)


def keep_biases(model: nn.Module) -> None:
    """Let the packed layers of `model` leave their biases where and as they are."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for module in model.modules():
        if isinstance(module, Linear4bit | Linear8bitLt) and module.bias is not None:
            module.forward = _WithCastBias(module, module.forward)


class _WithCastBias:
    """A layer's forward pass, for which it has a bias that it finds nothing to do to."""

    def __init__(self, module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._module, self._forward = module, forward

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        # A cast of a parameter is none; and what FSDP 1 has made flat is an attribute like any other.
        parameters: dict[str, Any] = self._module._parameters  # noqa: SLF001
        place = parameters if "bias" in parameters else self._module.__dict__
        held = place["bias"]
        place["bias"] = held.to(getattr(self._module, "compute_dtype", None) or inputs.dtype)
        try:
            return self._forward(inputs)
        finally:
            place["bias"] = held


def fix_cpu_unpacking(model: nn.Module) -> None:
    """Let the 4-bit layers of `model`, which is on a CPU, keep their weights as they are and unpack them right."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    _unpack_across_rows()


@cache
def _unpack_across_rows() -> torch.library.Library:
    """Put our kernel around that of bitsandbytes. Alive as long as the process, because torch forgets it with the library."""
    kernel = torch.library.get_kernel(f"bitsandbytes::{_UNPACK}", "CPU")

    def unpack(  # noqa: PLR0917 - as torch calls it
        keys: Any, packed: torch.Tensor, absmax: torch.Tensor, blocksize: int, code: str, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        # As one row there is only one start.
        rows = shape if shape[-1] % blocksize == 0 else [math.prod(shape)]
        unpacked: torch.Tensor = kernel.call_boxed(keys, packed, absmax, blocksize, code, rows, dtype)
        return unpacked.view(shape)

    library = torch.library.Library("bitsandbytes", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(_UNPACK, unpack, "CPU", with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
    return library
