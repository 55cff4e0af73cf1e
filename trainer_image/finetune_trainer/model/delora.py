"""DeLoRA's own part of a layer in float32, where the rest of the model computes in float16.

DeLoRA divides by the norms of its factors' rows and columns. B is zero at first, and PEFT 0.21 takes 1e-4 for its norms, so that
what is multiplied by B is some ten thousand times the layer's input: more than float16 holds, and infinity times zero is no number.

bfloat16 has the range of float32. Measured there, this changes nothing for the better: the gradient of the scale, a sum that can
nearly cancel, was off by as much of its norm (0.95 and 0.95, 0.22 and 0.23), because the base's own activations are rounded.
"""

from __future__ import annotations

from types import MethodType

import torch
from peft.tuners.delora import DeloraLinear
from torch import nn
from torch.nn import functional

_SMALLEST_NORM = 1e-4


def compute_in_float32(model: nn.Module) -> None:
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
