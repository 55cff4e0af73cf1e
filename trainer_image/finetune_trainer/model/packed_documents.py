"""Makes attention masks and rotary positions per document, for models that would not separate packed documents by themselves.

Masks are for model code that passes no positions when it makes masks. Rotary positions are for models whose frequencies depend on
the length: one of two sets (longrope: Phi 3 to 4, Phi 3.5 MoE), or a set for each length (dynamic). Here the set is chosen for
each document. A model's other masks stay as they are; preflight measures whether documents are separate
(preflight/small_model.py). Padding has positions as if it were a document.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils

LONGROPE, DYNAMIC = "longrope", "dynamic"
"""Kinds of rotary positions in transformers."""
_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
_POSITIONS: ContextVar[torch.Tensor | None] = ContextVar("positions", default=None)


def install_document_masks(model: nn.Module) -> None:
    """Make the code of this model's classes create masks through this module. Calling this again changes nothing."""
    modules = {base.__module__ for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
    for space in (vars(sys.modules[name]) for name in modules):
        for name in _MAKERS:
            if space is not vars(masking_utils) and space.get(name) is getattr(masking_utils, name):
                space[name] = _with_positions(space[name])


def leave_padding_unchecked(model: nn.Module) -> None:
    """Disable the library's search for padding in batches without a mask: in each call the host would wait for the device, only
    for a warning that is wrong for packed documents. Calling this again changes nothing.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _unchecked


def _unchecked(_input_ids: torch.Tensor, _attention_mask: torch.Tensor | None) -> None:
    """Do nothing, in place of `PreTrainedModel.warn_if_padding_and_no_attention_mask`."""


@contextmanager
def documents_apart(positions: torch.Tensor) -> Iterator[None]:
    """Keep documents apart when the body calls a prepared model. `positions` [B, T]: position of each token in its document."""
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
    """Whether positions are rounded to the computation's type, as in the ALiBi of Bloom and Falcon.

    Positions late in a sequence would be coarser than in a document on its own: bfloat16 has no number between 1024 and 1032.
    """
    return config.model_type == "bloom" or bool(getattr(config, "alibi", False))


def install_rope_by_document(model: nn.Module) -> None:
    """Make a model whose frequencies depend on the length choose them for each document. Calling this again changes nothing."""
    for module in model.modules():
        ropes = getattr(getattr(module, "config", None), "rope_parameters", None)
        kinds = getattr(module, "rope_type", None)
        by_length = {LONGROPE, DYNAMIC}.intersection(kinds.values() if isinstance(kinds, dict) else [kinds])
        if by_length and isinstance(ropes, dict) and not isinstance(module.forward, _ByDocument):
            module.forward = _ByDocument(module, kinds, ropes)


class _ByDocument:
    """The forward pass of a rotary embedding, which returns the rotation for each position."""

    def __init__(self, module: Any, kinds: Any, ropes: dict[str, Any]) -> None:
        self._module, self._forward, self._kinds, self._ropes = module, module.forward, kinds, ropes

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> tuple[torch.Tensor, ...]:
        named = {} if layer_type is None else {"layer_type": layer_type}
        kind, rope = (self._kinds, self._ropes) if layer_type is None else (self._kinds[layer_type], self._ropes[layer_type])
        if position_ids.dim() == 2 and kind == LONGROPE:
            return self._long_or_short(x, position_ids, rope["original_max_position_embeddings"], named)
        if position_ids.dim() == 2 and kind == DYNAMIC:
            return self._by_length(x, position_ids, named)
        rotation: tuple[torch.Tensor, ...] = self._forward(x, position_ids, **named)
        return rotation

    def _long_or_short(
        self, x: torch.Tensor, position_ids: torch.Tensor, longest_short: int, named: dict[str, str]
    ) -> tuple[torch.Tensor, ...]:
        # Both are computed for all documents, because a choice by value would make the host wait for the device.
        is_long = document_lengths(position_ids) > longest_short
        short = self._forward(x, position_ids.where(~is_long, 0), **named)
        long = self._forward(x, position_ids.where(is_long, 0), **named)
        return _chosen(is_long, long, short)

    def _by_length(self, x: torch.Tensor, position_ids: torch.Tensor, named: dict[str, str]) -> tuple[torch.Tensor, ...]:
        """Rotate each document as if it were alone: above the original length, each length has its own frequencies."""
        original = int(self._module.original_max_seq_len)
        lengths = document_lengths(position_ids)
        self._forget_lengths(named)
        rotation: tuple[torch.Tensor, ...] = self._forward(x, position_ids.where(lengths <= original, 0), **named)
        for length in sorted(set(lengths[lengths > original].tolist())):
            is_of_length = lengths == length
            self._forget_lengths(named)
            own = self._forward(x, position_ids.where(is_of_length, 0), **named)
            rotation = _chosen(is_of_length, own, rotation)
        return rotation

    def _forget_lengths(self, named: dict[str, str]) -> None:
        """Make the library compute frequencies again; otherwise it uses the longest sequence's frequencies for shorter ones."""
        prefix = f"{named['layer_type']}_" if named else ""
        setattr(self._module, f"{prefix}max_seq_len_cached", self._module.original_max_seq_len)
        original = getattr(self._module, f"{prefix}original_inv_freq")
        getattr(self._module, f"{prefix}inv_freq").data = original.to(getattr(self._module, f"{prefix}inv_freq").device)


def _chosen(is_first: torch.Tensor, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The first rotation where `is_first` [B, T], otherwise the second."""
    return tuple(torch.where(is_first[..., None], a, b) for a, b in zip(first, second, strict=True))


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Return for each token the length of its document. `position_ids` [B, T]: positions, which start at 0 in each document."""
    documents = (position_ids == 0).cumsum(dim=1)
    last = torch.zeros(position_ids.shape[0], position_ids.shape[1] + 1, dtype=position_ids.dtype, device=position_ids.device)
    return last.scatter_reduce(1, documents, position_ids, "amax").gather(1, documents) + 1
