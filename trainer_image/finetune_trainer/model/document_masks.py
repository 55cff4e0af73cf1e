"""Attention masks that keep packed documents apart, for models whose code does not ask for them.

transformers makes such a mask out of positions that start again, where a model hands them to the function that makes it. Some hand
them to their layers alone: GPT-OSS, Falcon, OPT, MPT, Granite's hybrids. Their masks get them here.

What a model masks by itself stays as it is; preflight measures whether documents are apart (preflight/packing.py).
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
from transformers import masking_utils

_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
_POSITIONS: ContextVar[torch.Tensor | None] = ContextVar("positions", default=None)


def install(model: nn.Module) -> None:
    """Let the code of this model's classes make its masks through here. Calling it again changes nothing."""
    modules = {base.__module__ for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
    for space in (vars(sys.modules[name]) for name in modules):
        for name in _MAKERS:
            if space is not vars(masking_utils) and space.get(name) is getattr(masking_utils, name):
                space[name] = _with_positions(space[name])


@contextmanager
def documents_apart(positions: torch.Tensor) -> Iterator[None]:
    """Around a call of a model with `install`. `positions` [B, T]: of each token in its document."""
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
