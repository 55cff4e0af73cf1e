"""Each way through a layer that a plan can switch to, on a device against the CPU: gradients of a step of a small model.

bench/gpu/kernels.py does the same for attention alone, in more architectures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.gpu.faults import TracedAlone
from bench.gpu.scale import Rows, Scale
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.train.step import compute_gradients
from tests.support.shapes import SmallRun, plan_of_shape, write_shape

CPU = torch.device("cpu")


@dataclass(frozen=True)
class KernelPath:
    """What of a plan is switched on."""

    kind: str = "llama"
    method: str = "LoRA"
    is_fast: bool = True
    training: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, *, may_compile: bool) -> RunPlan:
        training = {name: value for name, value in self.training.items() if may_compile or name != "compile"}
        return plan_of_shape(self.kind, is_fast=self.is_fast, method=self.method, precision="bf16", **training)

    def reference(self) -> RunPlan:
        """In float32, with none of it."""
        return plan_of_shape(self.kind, is_fast=False, method=self.method, precision="fp32")


PATHS = {
    "LoRA": KernelPath(),
    "QLoRA": KernelPath(method="QLoRA"),
    "compiled": KernelPath(training={"compile": True}),
    "a mask, and PEFT's layers": KernelPath(is_fast=False),
    "DoRA": KernelPath(method="DoRA"),
    "Full": KernelPath(method="Full"),
    "LoRA of GPT-2": KernelPath("gpt2"),
    "LoRA of experts": KernelPath("mixtral"),
}
QUICK = ("LoRA", "QLoRA")
BOUND, SLACK = 1.5, 5e-3
"""Largest relative distance from float32, in distances of the same path on a CPU, and more."""
ROUNDING = 0.02
"""Largest distance of a path on the CPU; 0.006 to 0.014 were measured."""


def paths(scale: Scale, rows: Rows) -> str:
    """All that a plan can switch, against float32 on the CPU. What is wrong; empty: nothing."""
    if scale.is_toy and not scale.is_quick:
        # Compiling for a CPU would take a compiler and minutes.
        TracedAlone().arm(0)
    rows += path_rows(scale.device, QUICK if scale.is_quick else tuple(PATHS))
    far = [str(row["path"]) for row in rows if not row["is_within_bound"]]
    return f"further from float32 on the CPU than they may be: {', '.join(far)}" if far else ""


def path_rows(device: torch.device, names: Collection[str]) -> list[dict[str, object]]:
    """One row for each path: how far its gradients are from those in float32, on the CPU and on the device."""
    rows: list[dict[str, object]] = []
    for name in names:
        path = PATHS[name]
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
            base = write_shape(Path(place), path.kind, torch.bfloat16)
            reference = SmallRun(path.reference(), base)
            start = {each: value.detach().clone() for each, value in reference.model.named_parameters() if value.requires_grad}
            wanted = _gradients(reference, start)
            on_cpu = _distance(_gradients(SmallRun(path.plan(may_compile=False), base), start), wanted)
            run = SmallRun(path.plan(may_compile=True), base, device)
            found, again = _gradients(run, start), _gradients(run, start)
        far = _distance(found, wanted)
        rows.append(
            {
                "path": name,
                "distance on the CPU": on_cpu,
                "distance": far,
                "is_within_bound": far <= BOUND * on_cpu + SLACK and on_cpu <= ROUNDING,
                "same bits again": torch.equal(found, again),
            }
        )
    return rows


def _gradients(run: SmallRun, start: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of all that is trained, in one float32 vector on the CPU. start: the values to begin with, which devices draw otherwise."""
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if name in start:
                parameter.copy_(start[name])
    compute_gradients(run.inputs, step=0, weight=1 / 64)
    found = [each.grad.float().cpu().flatten() for _, each in sorted(run.model.named_parameters()) if each.grad is not None]
    run.optimizer.zero_grad(set_to_none=True)
    return torch.cat(found)


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in the Euclidean norm."""
    return float((found - wanted).norm() / wanted.norm())
