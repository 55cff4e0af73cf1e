"""Activation checkpointing per layer: all of a layer's activations computed again in backward, or only the cheap ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from finetune_job.api.training import ActivationCheckpointing

_KEPT_NAMES = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "_scaled_mm",
    "linear",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
KEPT = frozenset(
    overload
    for name in _KEPT_NAMES
    if (packet := getattr(torch.ops.aten, name, None)) is not None
    for overload in (getattr(packet, each) for each in packet.overloads())
)
"""Matrix products and attention, in every form in which torch dispatches them: dear to compute, and kept."""


def checkpoint_activations(model: PreTrainedModel, kind: ActivationCheckpointing) -> None:
    """Let each layer keep no activations, or only the results of matrix products and attention. Call between PEFT and sharding."""
    if kind is ActivationCheckpointing.NONE:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if kind is ActivationCheckpointing.SELECTIVE:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        _keep_from_adapters(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # transformers asks for gradients of the embeddings' output where it knows of adapters. Only reentrant checkpoints need them,
    # and the first layer would compute products that nobody reads.
    model.disable_input_require_grads()


def _keep_from_adapters(model: nn.Module) -> None:
    """Let adapters that add to their layer's result in place, as many of PEFT's do, add to a copy that is not kept.

    Else what is kept holds the adapter's part already, and gets it a second time in backward. torch (2.15) notices that only where
    the two tensors share a count of changes, and behind a matrix product of three dimensions they do not (_unsafe_view).
    """
    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(module, LoraLayer):
            module.get_base_layer().register_forward_hook(_copied)


def _copied(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    return output.clone() if isinstance(output, torch.Tensor) else output


def hide_gathering(model: nn.Module) -> None:
    """Let selective recomputation overlook what FSDP 2 does around the forward pass of a unit. Call after sharding.

    Units inside a layer are gathered at other moments when the layer is computed again, and torch (2.15: torch/utils/checkpoint.py,
    _CachedTorchDispatchMode) would look for the first pass's results by counting operations, those of the gathering among them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for hooks in (module._forward_pre_hooks, module._forward_hooks):  # noqa: SLF001 - nothing else leads to them
                for key, hook in hooks.items():
                    if type(getattr(hook, "__self__", None)).__name__ == "FSDPState":
                        hooks[key] = partial(_unseen, hook)


def _unseen(hook: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with _disable_current_modes():
        return hook(*arguments, **named)


def _policy(_context: object, operation: object, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
