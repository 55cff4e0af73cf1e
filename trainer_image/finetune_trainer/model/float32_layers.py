"""Parts of a 16-bit model that are held or computed in float32: trained copies of embeddings, and DeLoRA's part of a layer."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from peft.tuners.delora import DeloraLinear
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from torch.nn import functional

_SMALLEST_NORM = 1e-4
"""Of a row of A or a column of B, as in PEFT: smaller ones are taken for this."""


def cast_embedding_outputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Let each trained copy of an embedding in `model` return `dtype`."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for copy in module.modules_to_save.values():
                if isinstance(copy, nn.Embedding):
                    copy.register_forward_hook(partial(_cast, dtype))


def _cast(dtype: torch.dtype, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.to(dtype)


def compute_delora_in_float32(model: nn.Module) -> None:
    """Let the adapters of every DeLoRA layer compute in float32, whatever autocast or FSDP make of inputs and parameters."""
    for module in model.modules():
        if isinstance(module, DeloraLinear):
            module.forward = MethodType(_forward, module)


def _forward(layer: DeloraLinear, inputs: torch.Tensor) -> torch.Tensor:
    """W x + B diag(lambda / (r |a_i| |b_i|)) A (n x), n the norms of W's columns (Bini, Girrbach and Akata 2025, DeLoRA)."""
    (name,) = layer.active_adapters
    result = layer.base_layer(inputs)
    with torch.autocast(inputs.device.type, enabled=False):
        down, up = layer.delora_A[name].float(), layer.delora_B[name].float()
        norms = down.norm(dim=1).clamp(min=_SMALLEST_NORM) * up.norm(dim=0).clamp(min=_SMALLEST_NORM)
        scaling = layer.delora_lambda[name].float() / layer.r[name] / norms
        scaled = layer.delora_dropout[name](inputs.float()) * layer.delora_w_norm[name].float()
        added = functional.linear(functional.linear(scaled, down) * scaling, up)
    summed: torch.Tensor = result + added.to(result.dtype)
    return summed.to(inputs.dtype)
