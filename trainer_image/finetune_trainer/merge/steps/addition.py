"""W + scaling * tensor, elementwise: the bias on lora_B (peft tuners/lora/layer.py, `Linear.merge`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from finetune_trainer.merge.steps.low_rank import row_blocks
from finetune_trainer.merge.steps.step import Scratch
from finetune_trainer.weights.rounding import all_finite, round_into


@dataclass(frozen=True)
class AdditionStep:
    """tensor: (rows, columns) of the matrix, fp32."""

    tensor: torch.Tensor
    scaling: float
    compute: torch.dtype

    def row_blocks(self, num_rows: int, num_columns: int) -> list[tuple[int, int]]:
        """Any rows can be computed alone; the blocks are those of matrix products, so that they fit a low-rank step's."""
        return row_blocks(num_rows, num_columns)

    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:  # noqa: ARG002 - the protocol's
        changed = values.to(self.compute) + self.tensor[rows[0] : rows[1]] * self.scaling
        round_into(changed, self.compute, out)
        return all_finite(out)
