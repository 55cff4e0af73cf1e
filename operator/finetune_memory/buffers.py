"""What FSDP holds beside shards while it gathers parameters and reduces gradients."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_job.plan.element_types import DTYPE_BYTES, Elements
from finetune_job.plan.run_plan import FsdpPlan
from finetune_memory.sharding import Unit


def gathered_bytes(units: Sequence[Unit], fsdp: FsdpPlan, elements: Elements) -> int:
    """Whole parameters at the fullest moment, which are never sharded in between for the root.

    Of the other units one is in use, with the buffer that it was gathered into, and the next one is being gathered
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: `unshard` is issued one unit ahead, and a buffer goes when the next
    one is copied out). With `reshardAfterForward: false` all of them stay, and no second copy of any is needed but of one.
    """
    sizes = [unit.gathered_bytes(elements.param) for unit in units]
    root = sizes[-1] if units and not units[-1].name else 0
    others = sizes[:-1] if root else sizes
    if not others:
        return 2 * root
    if fsdp.reshard_after_forward is False:
        return root + sum(others) + max(*others, root)
    if fsdp.version == 1:
        # One flat parameter in use and one that is gathered ahead; views need no copies.
        return root + 2 * max(others)
    return max(root + 3 * max(others), 2 * root + max(others))


def reduced_bytes(units: Sequence[Unit], elements: Elements) -> int:
    """Gradients of the largest unit: whole, in the element type of the computation, and laid out in that of the reduction."""
    found = 0
    for unit in units:
        whole = copied = 0
        for each in unit.parameters:
            if each.is_trained:
                whole += each.numel * DTYPE_BYTES[elements.param or each.dtype]
                copied += each.numel * DTYPE_BYTES[elements.reduce or elements.param or each.dtype]
        found = max(found, whole + copied)
    return found
