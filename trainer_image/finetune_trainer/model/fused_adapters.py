"""LoRA's forward pass in the element type of the base, with its scaling and its sum in one product.

PEFT casts the input of each layer to the type in which adapters are held, multiplies by the scaling and adds, each by a kernel of
its own over all tokens. Here the two small factors are cast instead, and the second product adds to what the base computed. The
weights that are trained, saved and merged stay what and where they were: float32 if `autocastAdapterDtype` says so.
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
"""By its name: what packs nothing does not import bitsandbytes."""


def fuse_adapters(model: PeftModel, units: Collection[str]) -> int:
    """Replace the forward pass of each layer that is LoRA and no more; how many there are. Call before sharding.

    `units`: names of the modules that FSDP will gather by themselves. A layer whose factors are among them keeps PEFT's, which
    calls them.
    """
    fused = 0
    for name, layer in lora_layers(model).items():
        if _is_plain(layer) and not any(unit.startswith(f"{name}.lora_") for unit in units):
            # A class, not a function of this layer: compiled code holds for all layers of one type, and for one function alone.
            kind: Any = type(layer)
            layer.__class__ = _fused_class(kind)
            fused += 1
    return fused


def _is_plain(layer: LoraLayer) -> bool:
    """One adapter, without biases of its own and other arithmetic than a product after dropout."""
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
    """PEFT's class of layers with this module's forward pass: one for all layers of a kind."""
    return type(f"Fused{kind.__name__}", (_Fused, kind), {"adds_in_place": not _is_packed(kind)})


class _Fused:
    """Over one of PEFT's classes, where one adapter is active and nothing is merged."""

    adds_in_place: bool
    """Not where bitsandbytes computes the base: PEFT, too, leaves what its function returned as it is."""

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., features in] to [..., features out]."""
        if args or kwargs or self.disable_adapters or self.merged:
            plain: torch.Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return plain
        rows = x.flatten(0, -2)
        result: torch.Tensor = self.base_layer(rows)
        kind, scaling = result.dtype, self.scaling[ADAPTER]
        first, second = self.lora_A[ADAPTER].weight.to(kind), self.lora_B[ADAPTER].weight.to(kind)
        inner = functional.linear(self.lora_dropout[ADAPTER](rows.to(kind)), first)
        if torch.compiler.is_compiling():
            # The compiler adds where it reads the sum next, and leaves a sum within a product as a copy of its own.
            result = result + functional.linear(inner * scaling, second)
        elif self.adds_in_place:
            # In place: nothing else has what the base computed, and a product that adds to it would copy it first.
            result.addmm_(inner, second.t(), alpha=scaling)
        else:
            result = torch.addmm(result, inner, second.t(), alpha=scaling)
        return result.view(*x.shape[:-1], -1)
