"""The interface of every kind of change for the stream, and a step that is computed on another device than the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from finetune_trainer.weights.errors import DeviceUnavailableError
from finetune_trainer.weights.headers import TensorHeader

ReadTensor = Callable[[TensorHeader], torch.Tensor]
"""Loads one of the adapter's tensors as its header says, in its own dtype and shape."""


class Scratch:
    """fp32 blocks that a worker reuses: allocating them for each block took half of the time."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._blocks = [torch.empty(0, device=device), torch.empty(0, device=device)]

    def block(self, number: int, num_rows: int, num_columns: int) -> torch.Tensor:
        """Block `number` (0 or 1) as (num_rows, num_columns), contents undefined."""
        count = num_rows * num_columns
        if self._blocks[number].numel() < count:
            self._blocks[number] = torch.empty(count, device=self._blocks[number].device)
        return self._blocks[number][:count].view(num_rows, num_columns)


class Step(Protocol):
    """One change with its tensors in memory, for one matrix of (num_rows, num_columns)."""

    def row_blocks(self, num_rows: int, num_columns: int) -> list[tuple[int, int]]:
        """Rows that must be computed together for the right bits; in order, without gaps.

        A single block of all rows means that no part of the matrix can be finished alone.
        """

    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:
        """Write the changed rows to `out`; returns whether all of them are finite.

        rows: first and last + 1 within the matrix. values: (rows, columns), in the stored dtype or the one in which PEFT would
        hold them. out: (rows, columns), in the latter or, for the last step, in the output's; rounded to the latter first.
        """


class WholeMatrix:
    """Base of steps that need all of a matrix: PEFT merges whole modules, double quantisation quantizes all maxima together."""

    def row_blocks(self, num_rows: int, num_columns: int) -> list[tuple[int, int]]:  # noqa: ARG002 - as every step
        """One block of all rows."""
        return [(0, num_rows)]


_of_thread = threading.local()


@dataclass(frozen=True)
class OnDevice:
    """A `step` whose tensors are on `device`. PEFT's bits on a CPU are not promised: devices add up in other orders."""

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
            f"device {name}: torch sees no GPU on this machine (no driver, or none was given to the container). Set device to "
            "cpu."
        )
    return device


def _scratch(device: torch.device) -> Scratch:
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = Scratch(device)
    scratch: Scratch = _of_thread.scratch
    return scratch
