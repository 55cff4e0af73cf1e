"""Computes LoRA's forward pass in the element type of the base, with scaling and sum fused into one product.

PEFT casts the input of each layer to the type of the adapters, multiplies by the scaling, and adds; each of these takes a
separate kernel over all tokens. Here the two small factors are cast instead, and the second product adds to the base's output.
The trained, saved and merged weights stay as they are: float32 if `autocastAdapterDtype` says so.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear, LoraLayer
from torch import nn
from torch.nn import functional

from finetune_job.module_names import ADAPTER
from finetune_trainer.model.adapters import lora_layers

_PACKED = "peft.tuners.lora.bnb.Linear4bit"
"""PEFT's 4-bit layer. It is compared by name, so that a run without packed weights does not import bitsandbytes."""


def fuse_adapters(model: PeftModel, units: Collection[str]) -> int:
    """Replace the forward pass of each plain LoRA layer; return the number of layers. Call this before sharding.

    `units`: names of the modules that are FSDP units. A layer whose factors are units keeps PEFT's forward pass, which calls
    them.
    """
    fused = 0
    for name, layer in lora_layers(model).items():
        if _is_plain(layer) and not any(unit.startswith(f"{name}.lora_") for unit in units):
            # The class is replaced, not this layer's method: compiled code serves all layers of a class, but only one method.
            kind: Any = type(layer)
            layer.__class__ = _fused_class(kind)
            fused += 1
    return fused


def _is_plain(layer: LoraLayer) -> bool:
    """Whether the layer has only one adapter, which has no bias and computes only a product after dropout."""
    return (
        (type(layer) is Linear or _is_packed(type(layer)))
        and layer.active_adapters == [ADAPTER]
        and list(layer.lora_A) == [ADAPTER]
        and ADAPTER not in layer.lora_variant
        and not layer.lora_bias[ADAPTER]
        and isinstance(layer.lora_dropout[ADAPTER], nn.Identity | nn.Dropout)
    )


def _is_packed(kind: type) -> bool:
    return f"{kind.__module__}.{kind.__qualname__.rpartition('.')[2]}" == _PACKED


@cache
def _fused_class(kind: type) -> Any:
    """Return a subclass of PEFT's class with our forward pass; all layers of a class share it."""
    return type(f"Fused{kind.__name__}", (_Fused, kind), {"adds_in_place": not _is_packed(kind)})


class _Fused:
    """A mixin for one of PEFT's classes, for layers with one active adapter and nothing merged."""

    adds_in_place: bool
    """Whether to add to the base's output in place; false if bitsandbytes computes that output, as in PEFT."""

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Map [..., features in] to [..., features out]."""
        if args or kwargs or self.disable_adapters or self.merged:
            plain: torch.Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return plain
        rows = x.flatten(0, -2)
        result: torch.Tensor = self.base_layer(rows)
        kind, scaling = result.dtype, self.scaling[ADAPTER]
        first, second = self.lora_A[ADAPTER].weight.to(kind), self.lora_B[ADAPTER].weight.to(kind)
        inner = functional.linear(self.lora_dropout[ADAPTER](rows.to(kind)), first)
        if torch.compiler.is_compiling():
            # The compiler fuses this sum into the next operation; a sum inside the product would need a separate copy.
            result = result + functional.linear(inner * scaling, second)
        elif self.adds_in_place:
            # In place, since nothing else uses the base's output; `torch.addmm` would copy it first.
            result.addmm_(inner, second.t(), alpha=scaling)
        else:
            result = torch.addmm(result, inner, second.t(), alpha=scaling)
        return result.view(*x.shape[:-1], -1)
