"""When gradients are summed over ranks: after each micro-step, or once per optimizer step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel


@dataclass(frozen=True)
class Reduction:
    """Decided once for a run: each rank, before and after a restart, has to add in the same order."""

    every_micro_step: bool = True
    keeps_gathered: bool = False
    """Whether FSDP 2 leaves parameters whole between forward and backward."""


def reduces_every_micro_step(model: nn.Module, *, trains_adapter: bool) -> bool:
    """Gradients that wait for the last micro-step are whole on every rank: little for adapters, a model's size for all else.

    FSDP 1 that keeps original parameters holds one gradient for a unit's frozen and trained parameters together; and with
    offloaded parameters it forgets what earlier micro-steps have reduced (torch's documentation of CPUOffload), so it must wait.
    """
    if not isinstance(model, FullyShardedDataParallel):
        return not trains_adapter
    if model.cpu_offload.offload_params:
        return False
    return not trains_adapter or any(unit._use_orig_params for unit in FullyShardedDataParallel.fsdp_modules(model))  # noqa: SLF001


def reducing(model: nn.Module, reduction: Reduction, *, is_last: bool) -> AbstractContextManager[None]:
    """Within: one forward and backward pass, after which gradients are reduced only where that is due.

    Parameters that stay whole between forward and backward anyway stay so until the last pass of an optimizer step, which changes
    them: they are gathered once and not at each pass.
    """
    is_due = reduction.every_micro_step or is_last
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_due)
        model.set_reshard_after_backward(is_last or not reduction.keeps_gathered)
    elif isinstance(model, FullyShardedDataParallel) and not is_due:
        no_sync: AbstractContextManager[None] = model.no_sync()
        return no_sync
    return nullcontext()
