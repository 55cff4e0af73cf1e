"""Makes trained copies of embeddings, which are held in float32, return the model's element type."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import nn


def cast_embedding_outputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Make each trained copy of an embedding in `model` return `dtype`."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for copy in module.modules_to_save.values():
                if isinstance(copy, nn.Embedding):
                    copy.register_forward_hook(partial(_cast, dtype))


def _cast(dtype: torch.dtype, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.to(dtype)
