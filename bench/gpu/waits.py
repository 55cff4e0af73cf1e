"""How often the host waits for a device in an optimizer step: torch raises where it would, but for the one read of the step."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.support.shapes import WITHOUT_VARLEN, SmallRun, plan_of_shape, write_shape

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {}),
    "gpt2": ("gpt2", {}),
    "llama, ordered": ("llama", {"ranks": 2, "reduction": "Ordered"}),
    "llama, QLoRA": ("llama", {"method": "QLoRA"}),
    "llama, DoRA": ("llama", {"method": "DoRA"}),
    "llama, Full": ("llama", {"method": "Full"}),
    "llama, dropout": ("llama", {"dropout": "0.1"}),
}
"""What has no mask; for one transformers looks at the positions of each batch."""


class Reads(TorchFunctionMode):
    """Lets the first read of losses and norm through, which are float64, and counts all."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.count = 0
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # By the type of the device alone: one without a number is not equal to that of its tensors.
        if func is not torch.Tensor.tolist or (args[0].dtype, args[0].device.type) != (torch.float64, self._device.type):
            return func(*args, **(kwargs or {}))
        self.count += 1
        with waits_raise(self._device, raises=self.count > 1):
            return func(*args, **(kwargs or {}))


@contextmanager
def waits_raise(device: torch.device, *, raises: bool = True) -> Iterator[None]:
    """Whether torch raises where the host would wait for this device; on a CPU nobody waits."""
    if device.type == "cpu":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error" if raises else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def wait_rows(device: torch.device) -> list[dict[str, object]]:
    """One row for each run: reads of its third step, and what torch raised."""
    rows: list[dict[str, object]] = []
    for name, (kind, training) in RUNS.items():
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
            plan = plan_of_shape(kind, is_fast=True, precision="bf16", **training)
            run = SmallRun(plan, write_shape(Path(place), kind, torch.bfloat16), device)
        for number in range(2):
            run.step(number)
        problem, reads = "", Reads(device)
        try:
            with reads, waits_raise(device):
                run.step(2)
        except RuntimeError as error:
            problem = str(error)[:300]
        rows.append({"model": name, "reads": reads.count, "problem": problem})
    rows += [{"model": kind, "not shown": "a mask takes a wait for each micro-batch"} for kind in WITHOUT_VARLEN]
    return rows
