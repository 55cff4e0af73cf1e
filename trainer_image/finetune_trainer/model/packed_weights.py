"""Fixes three faults of bitsandbytes 0.50's packed layers, which silently give wrong numbers in training.

First, a layer permanently replaces its bias with a copy in the element type of its input: sharding gathers a trained bias into
other memory, so this copy is never updated. Second, on a CPU, a forward pass of a 4-bit layer without gradients in evaluation
mode permanently repacks the weights for a faster kernel, and later training unpacks them as if they had not changed. Third, the
CPU kernel that unpacks weights (AVX-512) starts a block of 64 values at each row, although blocks continue across rows: its
result is wrong if 64 does not divide the width of a row.
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
    """Whether this is a 4-bit layer whose weight is not loaded yet."""
    # It is recognised by its attribute, so that a run without packed weights does not import bitsandbytes.
    return getattr(layer, "quant_state", layer) is None and getattr(layer.weight, "quant_state", None) is None


def make_fit_for_training(model: nn.Module, device: torch.device) -> None:
    """Fix all three faults in the packed layers of `model`, which is to be trained on `device`."""
    keep_biases(model)
    if device.type == "cpu":
        fix_cpu_unpacking(model)


def keep_biases(model: nn.Module) -> None:
    """Stop the packed layers of `model` from casting or moving their biases."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for module in model.modules():
        if isinstance(module, Linear4bit | Linear8bitLt) and module.bias is not None:
            module.forward = _WithCastBias(module, module.forward)


class _WithCastBias:
    """A layer's forward pass with a bias that already has the type of its input."""

    def __init__(self, module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._module, self._forward = module, forward

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        # This dictionary also accepts plain tensors, as casts return. A parameter flattened by FSDP 1 is an ordinary attribute.
        parameters: dict[str, Any] = self._module._parameters  # noqa: SLF001
        place = parameters if "bias" in parameters else self._module.__dict__
        bias = place["bias"]
        place["bias"] = bias.to(getattr(self._module, "compute_dtype", None) or inputs.dtype)
        try:
            return self._forward(inputs)
        finally:
            place["bias"] = bias


def fix_cpu_unpacking(model: nn.Module) -> None:
    """Make the 4-bit layers of `model`, which is on a CPU, keep their weights unchanged and unpack them correctly."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    _unpack_across_rows()


@cache
def _unpack_across_rows() -> torch.library.Library:
    """Wrap bitsandbytes' kernel. The returned library must outlive all uses, because torch removes our kernel with it."""
    kernel = torch.library.get_kernel(f"bitsandbytes::{_UNPACK}", "CPU")

    def unpack(  # noqa: PLR0917 - as torch calls it
        keys: Any, packed: torch.Tensor, absmax: torch.Tensor, blocksize: int, code: str, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        # The kernel starts a new block at each row. Passing all values as a single row keeps the blocks as they were packed.
        rows = shape if shape[-1] % blocksize == 0 else [math.prod(shape)]
        unpacked: torch.Tensor = kernel.call_boxed(keys, packed, absmax, blocksize, code, rows, dtype)
        return unpacked.view(shape)

    library = torch.library.Library("bitsandbytes", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(_UNPACK, unpack, "CPU", with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
    return library
