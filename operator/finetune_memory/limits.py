"""How much memory a rank may take: of its device, or its share of the pod's where there is none."""

from __future__ import annotations

import re
from dataclasses import dataclass

from finetune_job.plan.placement import Placement
from finetune_job.plan.run_plan import RunPlan

_FACTORS = {"m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


@dataclass(frozen=True)
class Limit:
    """Bytes that one rank may take."""

    bytes: int
    is_device: bool
    """Whether it is a device's memory, beyond which nothing can be allocated."""
    source: str
    """Where it was named."""


def quantity_bytes(text: str) -> int:
    """Bytes of a Kubernetes quantity such as 80Gi. Raises ValueError."""
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a quantity of memory; write it as in 80Gi")
    return int(float(found[1]) * _FACTORS[found[2] or ""])


def limit_of(plan: RunPlan) -> Limit | None:
    """By the plan's placement; None in local mode, where nobody has said."""
    placement = plan.placement
    if placement is None:
        return None
    if placement.gpu_memory is not None:
        return Limit(quantity_bytes(placement.gpu_memory), is_device=True, source=f"gpu.memory of profile {placement.profile}")
    if placement.gpu_resource_name is not None:
        return None  # of a release that did not freeze the memory of a device
    return _share_of_the_pod(plan, placement)


def host_limit_of(plan: RunPlan) -> Limit | None:
    """A rank's share of the pod's memory beside its device; None where there is no device, or nobody has said."""
    placement = plan.placement
    if placement is None or placement.gpu_memory is None:
        return None
    return _share_of_the_pod(plan, placement)


def _share_of_the_pod(plan: RunPlan, placement: Placement) -> Limit:
    share = quantity_bytes(placement.resources.train.memory) // plan.parallelism.processes_per_node
    return Limit(share, is_device=False, source=f"a rank's share of resources.train.memory of profile {placement.profile}")


def shown(count: int) -> str:
    """A number of bytes for people: 12.3 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
