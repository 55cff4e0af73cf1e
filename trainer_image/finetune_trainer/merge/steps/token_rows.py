"""Some rows of an embedding are replaced by trained ones (peft tuners/trainable_tokens/layer.py, `merge`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from finetune_trainer.merge.steps.low_rank import row_blocks
from finetune_trainer.merge.steps.step import Scratch
from finetune_trainer.weights.rounding import all_finite, round_into


@dataclass(frozen=True)
class TokenRowsStep:
    """tokens: (number of indices, columns), in the adapter file's dtype."""

    indices: tuple[int, ...]
    tokens: torch.Tensor
    compute: torch.dtype

    def row_blocks(self, num_rows: int, num_columns: int) -> list[tuple[int, int]]:
        """Any rows can be computed alone; the blocks are those of matrix products, so that they fit a low-rank step's."""
        return row_blocks(num_rows, num_columns)

    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:  # noqa: ARG002 - the protocol's
        first, last = rows
        round_into(values, self.compute, out)
        inside = [number for number, index in enumerate(self.indices) if first <= index < last]
        for number in inside:  # in order: where an index comes twice, the last row wins
            round_into(self.tokens[number], self.compute, out[self.indices[number] - first])
        return all(all_finite(out[self.indices[number] - first]) for number in inside)
