"""When gradients are summed over ranks: after each micro-step, or once per optimizer step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel


def reduces_every_micro_step(model: nn.Module) -> bool:
    """Gradients that wait for the last micro-step are whole on every rank: little for adapters, a model's size for all else.

    FSDP 1 that keeps original parameters holds one gradient for a unit's frozen and trained parameters together; and with
    offloaded parameters it forgets what earlier micro-steps have reduced (torch's documentation of CPUOffload), so it must wait.
    """
    if isinstance(model, FullyShardedDataParallel) and model.cpu_offload.offload_params:
        return False
    # Architectures freeze some parameter of their own also where the whole model is trained.
    trains_most = sum(parameter.numel() * (1 if parameter.requires_grad else -1) for parameter in model.parameters()) > 0
    if isinstance(model, FullyShardedDataParallel):
        return trains_most or any(unit._use_orig_params for unit in FullyShardedDataParallel.fsdp_modules(model))  # noqa: SLF001
    return trains_most


def reducing(model: nn.Module, is_due: bool, *, is_last: bool, keeps_gathered: bool) -> AbstractContextManager[None]:
    """Within: one forward and backward pass, after which gradients are reduced only where that is due.

    `keeps_gathered`: parameters stay whole between forward and backward anyway, so until the last pass of an optimizer step, which
    changes them, they are gathered once and not at each pass.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_due)
        model.set_reshard_after_backward(is_last or not keeps_gathered)
    elif isinstance(model, FullyShardedDataParallel) and not is_due:
        no_sync: AbstractContextManager[None] = model.no_sync()
        return no_sync
    return nullcontext()
