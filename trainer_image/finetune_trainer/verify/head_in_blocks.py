"""An output head that is multiplied block by block: neither all of its weights nor their products are in memory at once.

This module decides which head is computed so, and has its forward pass. Called by streaming.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from finetune_trainer.verify.skeleton import HOST, ParameterSlot, SkeletonModel

HEAD_BLOCK_BYTES = 64 << 20
"""Bytes of an output head that are in memory at a time."""


class HeadInBlocks:
    """Replaces the forward of a linear layer."""

    def __init__(
        self,
        head: nn.Linear,
        slot: ParameterSlot,
        bias: torch.Tensor | None,
        block: Callable[[int, int], torch.Tensor],
        scratch: Path,
    ) -> None:
        """slot: of its weight. block: waits for the weight's rows [first, last). scratch: a directory for products."""
        self._slot, self._bias, self._block, self._scratch = slot, bias, block, scratch
        self._shape = head.out_features, head.in_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (..., in) -> (..., out)."""
        num_out, num_in = self._shape
        step = max(1, HEAD_BLOCK_BYTES // (num_in * self._slot.dtype.itemsize))
        bounds = [(first, min(first + step, num_out)) for first in range(0, num_out, step)]
        with tempfile.TemporaryFile(dir=self._scratch) as file:
            for first, last in bounds:
                weight = self._block(first, last)
                bias = None if self._bias is None else self._bias[first:last]
                part = nn.functional.linear(hidden, weight, bias)
                file.write(stored_bytes(part.to(HOST)))
                del weight, part
            file.seek(0)
            out = torch.empty((*hidden.shape[:-1], num_out), dtype=hidden.dtype)
            for first, last in bounds:
                size = out[..., first:last].numel() * out.dtype.itemsize
                stored = torch.frombuffer(bytearray(file.read(size)), dtype=out.dtype)
                out[..., first:last].copy_(stored.view(*hidden.shape[:-1], last - first))
        return out.to(hidden.device)


def blocked_head(skeleton: SkeletonModel, by_module: Mapping[int, Sequence[ParameterSlot]]) -> nn.Linear | None:
    """The output head if it is a large linear layer of which only the product is used, else None. by_module: slots by the
    module's id.
    """
    unit = skeleton.base.get_output_embeddings()
    head = inner(unit) if unit is not None else None
    if type(head) is not nn.Linear or id(head) not in by_module:
        return None
    if unit is not head and (type(unit) is not LoraLinear or any(unit.use_dora.values())):
        return None
    slot = next((slot for slot in by_module[id(head)] if slot.name == "weight"), None)
    if slot is None or head.weight.numel() * slot.dtype.itemsize <= HEAD_BLOCK_BYTES:
        return None
    return head


def inner(module: nn.Module) -> nn.Module:
    """The layer inside an adapter's layer, or `module` itself."""
    if not isinstance(module, BaseTunerLayer):
        return module
    base_layer: nn.Module = module.get_base_layer()
    return base_layer


def stored_bytes(tensor: torch.Tensor) -> memoryview:
    """Values row after row, as in files."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
