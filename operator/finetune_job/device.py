"""Describes the devices on which the ranks of a job compute, and warns if a large model would be trained without a GPU."""

from __future__ import annotations

import re

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.names import GPU_PRODUCT_LABEL
from finetune_job.plan.run_plan import RunPlan

LARGE_ON_CPU = "large-model-on-cpu"
LARGE_PARAMETERS = 1_000_000_000
"""Number of parameters from which a training step on CPU cores takes minutes, and a run takes days."""
_SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d{1,3})?)[bB](?![A-Za-z0-9])")


def device_text(plan: RunPlan, device: str | None = None) -> str:
    """Describe ranks and devices in words. device: name of the device to use without a profile; None if it is unknown."""
    ranks, placement = plan.parallelism.world_size, plan.placement
    count = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if placement is None and device is not None:
        return f"{count}, each on one {device}"
    if placement is None:
        return f"{count}; on GPUs if the profile names one, which is not known here (--profile), or if this machine has them"
    if placement.gpu_resource_name is None:
        return f"{count} on CPU: profile {placement.profile} names no GPU"
    memory = f" of {placement.gpu_memory}" if placement.gpu_memory is not None else ""
    product = product_of(plan)
    named = f", {product}" if product is not None else ""
    return f"{count}, each on one {placement.gpu_resource_name}{memory}{named} (profile {placement.profile})"


def product_of(plan: RunPlan) -> str | None:
    """Return the name of this run's GPUs, from the profile's gpu.product or the GPU label in the training pods' node selector."""
    placement = plan.placement
    if placement is None or placement.gpu_resource_name is None:
        return None
    selected = placement.node_selector | placement.pods.train.node_selector
    return placement.gpu_product or selected.get(GPU_PRODUCT_LABEL)


def parameters_by_name(source: str) -> int | None:
    """Read the number of parameters from the name of a model, as in Llama-3.1-8B and Mixtral-8x7B."""
    sizes = _SIZE_IN_NAME.findall(source.rstrip("/").rpartition("/")[2])
    return None if not sizes else max(int(float(size) * int(times or 1) * 1e9) for times, size in sizes)


def large_on_cpu(plan: RunPlan, parameters: int | None) -> Finding | None:
    """Return a warning if a job without GPUs is to train a model that is too large for CPU cores."""
    placement = plan.placement
    if parameters is None or parameters < LARGE_PARAMETERS or placement is None or placement.gpu_resource_name is not None:
        return None
    return make_finding(
        LARGE_ON_CPU,
        field="spec.profile",
        value=placement.profile,
        message=f"{device_text(plan)}, and the model has about {parameters / 1e9:.3g} billion parameters: a step takes hundreds "
        "of times as long as on GPUs",
        fix="name a profile with GPUs, or have an administrator add gpu: {resourceName: nvidia.com/gpu, memory: 80Gi} to this "
        "one",
    )
