"""A step computed on another device than the CPU: rows go there, the result comes back."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from finetune_trainer.merge.steps.step import Scratch, Step
from finetune_trainer.weights.errors import DeviceUnavailableError

_of_thread = threading.local()


@dataclass(frozen=True)
class OnDevice:
    """`step` has its tensors on `device`. Equal bits to PEFT's on a CPU are not promised: devices add up in other orders."""

    step: Step
    device: torch.device

    def row_blocks(self, num_rows: int, num_columns: int) -> list[tuple[int, int]]:
        return self.step.row_blocks(num_rows, num_columns)

    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:  # noqa: ARG002 - is the CPU's
        on_device = torch.empty(out.shape, dtype=out.dtype, device=self.device)
        is_finite = self.step.apply(values.to(self.device), rows, on_device, _scratch(self.device))
        out.copy_(on_device)
        return is_finite


def require_device(name: str) -> torch.device:
    """The device of this name. Raises DeviceUnavailableError."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailableError(
            f"device {name}: torch sees no GPU on this machine (no driver, or none was given to the container). Set device to cpu."
        )
    return device


def _scratch(device: torch.device) -> Scratch:
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = Scratch(device)
    found: Scratch = _of_thread.scratch
    return found
