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
