"""Turns a Change into a Step: reads the adapter's tensors and passes them to the step for this kind of change.

The steps that add a tensor (the bias of lora_B) or replace rows are defined here; each other step has its own module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from finetune_trainer.merge.changes import Addition, Change, LowRank, ModuleMerge, Orientation, TokenRows
from finetune_trainer.merge.steps.low_rank import Factors, LowRankStep, part_of_factors
from finetune_trainer.merge.steps.step import ReadTensor, Scratch, Step
from finetune_trainer.weights.rounding import all_finite, round_into


def load_step(change: Change, num_rows: int, num_columns: int, compute: torch.dtype, read: ReadTensor) -> Step:
    """Return the step for one matrix of (num_rows, num_columns), which PEFT would hold in the dtype `compute`.

    read: loads a tensor in the dtype and shape of its header. Raises MergeError if this machine cannot compute PEFT's bits.
    """
    match change:
        case LowRank():
            a, b = read(change.a), read(change.b)
            # Take the part first: converting the factors of all experts again for each expert would take longer than the merge.
            if change.part is not None:
                a, b = part_of_factors(a, b, change.part, change.orientation, (num_rows, num_columns))
            magnitude = read(change.magnitude).float() if change.magnitude else None
            rounds_product = change.orientation is Orientation.EMBEDDING or change.part is not None
            factors = Factors(a.float(), b.float(), magnitude, change.scaling, change.orientation, rounds_product)
            return LowRankStep(factors, compute)
        case Addition():
            return AdditionStep(read(change.tensor).float().view(num_rows, num_columns), change.scaling, compute)
        case TokenRows():
            return TokenRowsStep(change.indices, read(change.tensor), compute)
        case ModuleMerge():
            # This imports transformers and PEFT, which take more memory than the merge itself.
            from finetune_trainer.merge.steps.peft_layer import ModuleStep

            return ModuleStep(change, compute, read)
        case _:
            from finetune_trainer.merge.steps.quantization import QuantizationStep

            return QuantizationStep(change, compute)


@dataclass(frozen=True)
class AdditionStep(Step):
    """Adds a tensor, which is in fp32 and has the matrix's shape."""

    tensor: torch.Tensor
    scaling: float
    compute: torch.dtype

    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:  # noqa: ARG002 - as every step
        round_into(values.to(self.compute) + self.tensor[slice(*rows)] * self.scaling, self.compute, out)
        return all_finite(out)


@dataclass(frozen=True)
class TokenRowsStep(Step):
    """Replaces rows. tokens: the new rows, of shape (number of indices, columns), in the dtype of the adapter's file."""

    indices: tuple[int, ...]
    tokens: torch.Tensor
    compute: torch.dtype

    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:  # noqa: ARG002 - as every step
        first, last = rows
        round_into(values, self.compute, out)
        inside = [number for number, index in enumerate(self.indices) if first <= index < last]
        for number in inside:  # in order, so that the last row wins if an index occurs twice
            round_into(self.tokens[number], self.compute, out[self.indices[number] - first])
        return all(all_finite(out[self.indices[number] - first]) for number in inside)
