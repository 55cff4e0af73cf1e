"""Change -> Step: reads the adapter's tensors and gives them to the step for this kind of change.

Kinds with arithmetic of their own have a module each; adding a tensor (the bias on lora_B) and replacing rows are here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from finetune_trainer.merge.changes import Addition, Change, LowRank, ModuleMerge, Orientation, TokenRows
from finetune_trainer.merge.steps.low_rank import LowRankStep, part_of_factors
from finetune_trainer.merge.steps.products import Factors, row_blocks
from finetune_trainer.merge.steps.step import ReadTensor, Scratch, Step
from finetune_trainer.processes.start import bring_meta_kernels
from finetune_trainer.weights.rounding import all_finite, round_into


def load_step(change: Change, num_rows: int, num_columns: int, compute: torch.dtype, read: ReadTensor) -> Step:
    """The step for one matrix of (num_rows, num_columns), which PEFT would hold in `compute`.

    read: loads a tensor as its header says, in its own dtype and shape. Raises MergeError if the change does not fit.
    """
    match change:
        case LowRank():
            return LowRankStep(_factors(change, num_rows, num_columns, read), compute)
        case Addition():
            return AdditionStep(read(change.tensor).float().view(num_rows, num_columns), change.scaling, compute)
        case TokenRows():
            return TokenRowsStep(change.indices, read(change.tensor), compute)
        case ModuleMerge():
            # Imports transformers and PEFT, which take more memory than the merge itself, so only if they are needed.
            bring_meta_kernels()
            from finetune_trainer.merge.steps.peft_layer import ModuleStep

            return ModuleStep(change, compute, read)
        case _:
            bring_meta_kernels()
            from finetune_trainer.merge.steps.quantization import QuantizationStep

            return QuantizationStep(change, compute)


def _factors(change: LowRank, num_rows: int, num_columns: int, read: ReadTensor) -> Factors:
    a, b = read(change.a), read(change.b)
    if change.part is not None:
        a, b = part_of_factors(a, b, change.part, change.orientation, (num_rows, num_columns))
    magnitude = read(change.magnitude).float() if change.magnitude else None
    rounds_product = change.orientation is Orientation.EMBEDDING or change.part is not None
    # The part is taken first: widening the factors of all experts again for each would take longer than the merge.
    return Factors(a.float(), b.float(), magnitude, change.scaling, change.orientation, rounds_product)


@dataclass(frozen=True)
class AdditionStep:
    """Adds a tensor. tensor: (rows, columns) of the matrix, fp32."""

    tensor: torch.Tensor
    scaling: float
    compute: torch.dtype

    def row_blocks(self, num_rows: int, num_columns: int) -> list[tuple[int, int]]:
        """Blocks of matrix products, which fit a low-rank step's, although any rows could be computed alone."""
        return row_blocks(num_rows, num_columns)

    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:  # noqa: ARG002 - the protocol's
        changed = values.to(self.compute) + self.tensor[rows[0] : rows[1]] * self.scaling
        round_into(changed, self.compute, out)
        return all_finite(out)


@dataclass(frozen=True)
class TokenRowsStep:
    """Replaces rows. tokens: (number of indices, columns), in the adapter file's dtype."""

    indices: tuple[int, ...]
    tokens: torch.Tensor
    compute: torch.dtype

    def row_blocks(self, num_rows: int, num_columns: int) -> list[tuple[int, int]]:
        """Blocks of matrix products, which fit a low-rank step's, although any rows could be computed alone."""
        return row_blocks(num_rows, num_columns)

    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:  # noqa: ARG002 - the protocol's
        first, last = rows
        round_into(values, self.compute, out)
        inside = [number for number, index in enumerate(self.indices) if first <= index < last]
        for number in inside:  # in order, so that the last row wins if an index occurs twice
            round_into(self.tokens[number], self.compute, out[self.indices[number] - first])
        return all(all_finite(out[self.indices[number] - first]) for number in inside)
