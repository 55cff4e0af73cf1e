"""Packed documents that a model would not keep apart by itself: attention masks, and rotary positions, of each document.

Masks for code that does not ask for them; positions for models with two sets of frequencies (longrope: Phi 3 to 4, Phi 3.5 MoE),
one of which is chosen for each document. What a model masks by itself stays as it is; preflight measures whether documents are
apart (preflight/packing.py). Padding has positions of its own like a document, so no model need look for it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils

LONGROPE = "longrope"
_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
_POSITIONS: ContextVar[torch.Tensor | None] = ContextVar("positions", default=None)


def install_document_masks(model: nn.Module) -> None:
    """Let the code of this model's classes make its masks through here. Calling it again changes nothing."""
    modules = {base.__module__ for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
    for space in (vars(sys.modules[name]) for name in modules):
        for name in _MAKERS:
            if space is not vars(masking_utils) and space.get(name) is getattr(masking_utils, name):
                space[name] = _with_positions(space[name])


def leave_padding_unchecked(model: nn.Module) -> None:
    """Let no model of the library look for padding in a batch without a mask: the host would wait for the device at each call,
    for a warning that does not hold for packed documents. Calling it again changes nothing.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _unchecked


def _unchecked(_input_ids: torch.Tensor, _attention_mask: torch.Tensor | None) -> None:
    """In place of `PreTrainedModel.warn_if_padding_and_no_attention_mask`."""


@contextmanager
def documents_apart(positions: torch.Tensor) -> Iterator[None]:
    """Around a call of a model with `install_document_masks`. `positions` [B, T]: of each token in its document."""
    token = _POSITIONS.set(positions)
    try:
        yield
    finally:
        _POSITIONS.reset(token)


def _with_positions(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(config: Any, *args: Any, **settings: Any) -> Any:
        positions = _POSITIONS.get()
        if positions is not None and settings.get("position_ids") is None and not _rounds_positions(config):
            settings["position_ids"] = positions
        return make(config, *args, **settings)

    return made


def _rounds_positions(config: Any) -> bool:
    """Whether positions are numbers in the type of the computation, as in the ALiBi of Bloom and Falcon.

    A document far back in a sequence would have coarser ones than alone: bfloat16 has no number between 1024 and 1032.
    """
    return config.model_type == "bloom" or bool(getattr(config, "alibi", False))


def install_longrope_by_document(model: nn.Module) -> None:
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
