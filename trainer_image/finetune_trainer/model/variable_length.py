"""Computes attention over packed documents without a mask: registers torch's variable-length kernels with transformers.

transformers creates no mask for an attention that it does not know. The model's caller passes the bounds of documents, and
transformers hands them to every layer, also when a layer is recomputed in the backward pass. torch has no such kernel for CPUs,
where the same call therefore computes one document at a time; everything else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from finetune_job.plan.run_plan import ATTENTION_FIELD
from finetune_trainer.data.batches import to_device
from finetune_trainer.errors import ConfigError

NAME = "finetune_varlen"
"""The name under which this attention is registered with transformers."""
LEAST_CAPABILITY = (8, 0)
"""The lowest compute capability of a GPU that flash attention supports."""
_FIX = f"set {ATTENTION_FIELD}: sdpa"
_UNKNOWN = {
    "softcap": "caps its attention scores",
    "s_aux": "gives attention scores a sink",
    "position_bias": "adds a bias to attention scores",
}
"""Settings of attention that a layer may pass but the kernels do not support -> what such a layer does."""


def install(model: PreTrainedModel) -> None:
    """Make the model's layers use this attention. Raises ConfigError if the model's code does not look up attention by name."""
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    if not is_installed(model):
        raise ConfigError(f"{ATTENTION_FIELD}: the code of {type(model).__name__} has an attention of its own", _FIX)


@contextmanager
def installed(model: PreTrainedModel) -> Iterator[None]:
    """Install this attention while the body runs. Raises ConfigError as `install` does."""
    before = model.config._attn_implementation  # noqa: SLF001 - there is no public name
    try:
        install(model)
        yield
    finally:
        model.set_attn_implementation(before)


def is_installed(model: Any) -> bool:
    """Whether this attention is installed in `model`, which may have adapters and may be sharded."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME


def device_problem(device: torch.device, computed: torch.dtype) -> str:
    """Return why this device cannot use the kernels, or an empty text. `computed`: element type of products."""
    if device.type == "cpu":
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, actual = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, capability))
        return f"{torch.cuda.get_device_name(device)} has compute capability {actual}, and the kernels need {least}"
    return "" if computed in (torch.bfloat16, torch.float16) else f"products are {computed}, and the kernels take only 16 bits"


def document_bounds(positions: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Return the arguments for calling a model with this attention. `positions` [B, T] must be on the CPU, to avoid a wait.

    Padding after the last document of a row counts as a document, as with a mask.
    """
    starts = (positions.flatten() == 0).nonzero().flatten()
    bounds = torch.cat([starts, torch.tensor([positions.numel()])])
    longest = int(bounds.diff().max())
    on_device = to_device(bounds.to(torch.int32), device)
    return {"cu_seq_lens_q": on_device, "cu_seq_lens_k": on_device, "max_length_q": longest, "max_length_k": longest}


def attend(  # noqa: PLR0917 - transformers passes them in this way
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention over each document: [B, T, H, D] from queries [B, H, T, D], keys and values [B, H or fewer, T, D].

    Raises ConfigError for requests that the kernels do not support.
    """
    sees_before = getattr(module, "is_causal", True) if is_causal is None else is_causal
    problem = next((what for name, what in _UNKNOWN.items() if others.get(name) is not None), "")
    if attention_mask is not None:
        problem = "makes a mask of its own"
    elif dropout:
        problem = "drops attention scores at random"
    elif not sees_before or query.shape[2] != key.shape[2]:
        problem = "lets a token see later tokens"
    if problem or cu_seq_lens_q is None or max_length_q is None:
        raise ConfigError(
            f"{ATTENTION_FIELD}: varlen does not support {type(module).__name__}, which "
            f"{problem or 'does not hand on the bounds of documents'}",
            _FIX,
        )
    rows, _, length, _ = query.shape
    kind = query.device.type
    computed = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else value.dtype
    # In memory, a projection's output has tokens before heads, so these transposes copy nothing.
    queries, keys, values = (tensor.transpose(1, 2).flatten(0, 1).to(computed) for tensor in (query, key, value))
    window = -1 if sliding_window is None or sliding_window >= max_length_q else sliding_window - 1
    result = _kernel(kind)(
        queries,
        keys,
        values,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(window, 0),
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return result.view(rows, length, *result.shape[1:]), None


def _kernel(device_type: str) -> Callable[..., Any]:
    if device_type == "cpu":
        return by_document
    # Imported here because the CPU does not use it.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def by_document(  # noqa: PLR0917 - as torch's
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Compute on a CPU what `torch.nn.attention.varlen.varlen_attn` computes, with the same arguments and result.

    Attention is causal (a right window of 0), and queries and keys have equal bounds.
    """
    if window_size[1] != 0 or cu_seq_q is not cu_seq_k or max_q != max_k:
        raise ValueError("only causal attention of a document to itself")
    parts = []
    for start, stop in pairwise(cu_seq_q.tolist()):
        queries, keys, values = (tensor[start:stop].transpose(0, 1)[None] for tensor in (query, key, value))
        mask = _window(stop - start, window_size[0], query.device)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


def _window(length: int, left: int, device: torch.device) -> torch.Tensor | None:
    """Return the attention mask [length, length]; None if each token sees itself and all earlier tokens."""
    if left < 0 or length <= left + 1:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(-left)
