"""Rotary positions of models with two sets of frequencies (longrope: Phi 3 to 4, Phi 3.5 MoE), chosen for each document.

Texts beyond the length of the first training have frequencies of their own. transformers asks for the largest position of a whole
batch, so one long document would move all short ones that are packed or padded beside it to frequencies that they never have alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

LONGROPE = "longrope"


def install(model: nn.Module) -> None:
    """Let such a model choose for each document by itself. Calling it again changes nothing."""
    for module in model.modules():
        ropes = getattr(getattr(module, "config", None), "rope_parameters", None)
        kinds = getattr(module, "rope_type", None)
        has_longrope = LONGROPE in (kinds.values() if isinstance(kinds, dict) else [kinds])
        if has_longrope and isinstance(ropes, dict) and not isinstance(module.forward, _ByDocument):
            module.forward = _ByDocument(module.forward, kinds, ropes)


class _ByDocument:
    """The forward pass of a rotary embedding: what to rotate by, for each position."""

    def __init__(self, forward: Callable[..., Any], kinds: Any, ropes: dict[str, Any]) -> None:
        self._forward, self._kinds, self._ropes = forward, kinds, ropes

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> tuple[torch.Tensor, ...]:
        named = {} if layer_type is None else {"layer_type": layer_type}
        kind, rope = (self._kinds, self._ropes) if layer_type is None else (self._kinds[layer_type], self._ropes[layer_type])
        if kind != LONGROPE or position_ids.dim() != 2:
            found: tuple[torch.Tensor, ...] = self._forward(x, position_ids, **named)
            return found
        # Both are computed for all, because a choice by value would let the host wait for the device.
        is_long = document_lengths(position_ids) > rope["original_max_position_embeddings"]
        short = self._forward(x, position_ids.where(~is_long, 0), **named)
        long = self._forward(x, position_ids.where(is_long, 0), **named)
        return tuple(torch.where(is_long[..., None], one, other) for one, other in zip(long, short, strict=True))


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Of each token, the length of its document. `position_ids` [B, T]: from 0 in each."""
    documents = (position_ids == 0).cumsum(dim=1)
    last = torch.zeros(position_ids.shape[0], position_ids.shape[1] + 1, dtype=position_ids.dtype, device=position_ids.device)
    return last.scatter_reduce(1, documents, position_ids, "amax").gather(1, documents) + 1
