"""Copies of embeddings that are trained whole: held in float32, they hand on what the rest of a 16-bit model computes in.

Autocast leaves an embedding's output as it is, and a normalisation with 16-bit weights refuses float32 (torch: aten/native,
layer_norm). Only version 2 of FSDP casts the inputs of every unit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import nn


def hand_on(model: nn.Module, dtype: torch.dtype) -> None:
    """Let each trained copy of an embedding in `model` return `dtype`."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for copy in module.modules_to_save.values():
                if isinstance(copy, nn.Embedding):
                    copy.register_forward_hook(partial(_cast, dtype))


def _cast(dtype: torch.dtype, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.to(dtype)
