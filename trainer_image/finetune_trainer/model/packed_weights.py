"""4-bit layers of bitsandbytes 0.50 on a CPU, made fit for training: both faults give wrong numbers without a word.

A forward pass without gradients in evaluation mode packs the weights anew for a faster kernel, for good: whatever trains afterwards
unpacks them as if nothing had happened. And the kernel that unpacks weights (AVX-512) takes each row for the start of a block of 64
values, although blocks run on from row to row: wrong wherever 64 does not divide the width of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

_UNPACK = "dequantize_4bit"


def make_fit_for_training(model: nn.Module) -> None:
    """Let the 4-bit layers of `model`, which lies on a CPU, keep their weights as they are and unpack them right."""
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
