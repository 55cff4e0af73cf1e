"""Defines the interface between the stream and every kind of change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from finetune_trainer.weights.headers import TensorHeader

BLOCK_ROWS = 256
"""Number of rows per matrix product. When measured, blocks of 64 or more rows gave PEFT's bits; blocks of 1 and 7 did not."""
MIN_BLOCK_ROWS = 64
BLOCK_BYTES = 8 << 20
"""Approximate maximum size of an fp32 block. Weights with more than 8,192 columns have fewer rows per block."""

ReadTensor = Callable[[TensorHeader], torch.Tensor]
"""Loads one of the adapter's tensors in the dtype and shape of its header."""


class Scratch:
    """Blocks of memory that a worker reuses, because allocating new ones each time took half of the time."""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def block(self, number: int, num_rows: int, num_columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return block `number` as a (num_rows, num_columns) tensor with undefined content."""
        num_bytes = num_rows * num_columns * dtype.itemsize
        if number not in self._buffers or len(self._buffers[number]) < num_bytes:
            self._buffers[number] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffers[number][:num_bytes].view(dtype).view(num_rows, num_columns)


class Step(ABC):
    """One change with its tensors in memory, for one matrix of (num_rows, num_columns)."""

    def row_blocks(self, num_rows: int, num_columns: int) -> list[tuple[int, int]]:
        """Return blocks of rows, in order and without gaps. For PEFT's bits, the rows of a block must be computed together.

        A single block means that no part of the matrix can be finished alone.
        """
        return row_blocks(num_rows, num_columns)

    @abstractmethod
    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:
        """Write the changed rows to `out`. Return whether all of them are finite.

        rows: numbers of the first row and of the row after the last one. values: (rows, columns), in the stored dtype or the one
        in which PEFT would hold them. out: (rows, columns), in PEFT's dtype or, for the last step, in the output's dtype, in
        which case values are first rounded to PEFT's dtype.
        """


class WholeMatrix(Step):
    """Base class of steps that need the whole matrix: PEFT merges whole modules, and double quantization needs all maxima."""

    def row_blocks(self, num_rows: int, num_columns: int) -> list[tuple[int, int]]:  # noqa: ARG002 - as every step
        return [(0, num_rows)]


def row_blocks(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    """Cut rows into blocks for matrix products. The last block includes the remainder, as small blocks give different bits."""
    rows = min(BLOCK_ROWS, max(MIN_BLOCK_ROWS, BLOCK_BYTES // (4 * max(num_columns, 1)) // 8 * 8))
    starts = list(range(0, max(num_rows - rows, 0) + 1, rows))
    return [(start, stop) for start, stop in zip(starts, [*starts[1:], num_rows], strict=True)]
