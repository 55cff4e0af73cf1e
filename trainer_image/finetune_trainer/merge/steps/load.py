"""Change -> Step: reads the adapter's tensors and hands them to the module that carries out this kind of change."""

from __future__ import annotations

import torch

from finetune_trainer.merge.changes import Addition, Change, LowRank, ModuleMerge, Orientation, TokenRows
from finetune_trainer.merge.steps.addition import AdditionStep
from finetune_trainer.merge.steps.low_rank import Factors, LowRankStep
from finetune_trainer.merge.steps.step import Read, Step
from finetune_trainer.merge.steps.token_rows import TokenRowsStep


def load_step(change: Change, num_rows: int, num_columns: int, compute: torch.dtype, read: Read) -> Step:
    """The step for one matrix of (num_rows, num_columns), which PEFT would hold in `compute`.

    read: loads a tensor as its header says, in its own dtype and shape. Raises MergeError where the change does not fit.
    """
    match change:
        case LowRank():
            return LowRankStep(_factors(change, num_rows, num_columns, read), compute)
        case Addition():
            return AdditionStep(read(change.tensor).float().view(num_rows, num_columns), change.scaling, compute)
        case TokenRows():
            return TokenRowsStep(change.indices, read(change.tensor), compute)
        case ModuleMerge():
            # Imports transformers and PEFT, which take more memory than the merge itself: only where they are needed.
            from finetune_trainer.merge.steps.peft_layer import ModuleStep

            return ModuleStep(change, compute, read)
        case _:
            from finetune_trainer.merge.steps.quantization import QuantizationStep

            return QuantizationStep(change, compute)


def _factors(change: LowRank, num_rows: int, num_columns: int, read: Read) -> Factors:
    a, b = read(change.a), read(change.b)
    if change.part is not None:
        from finetune_trainer.merge.steps.experts import part_of_factors

        a, b = part_of_factors(a, b, change.part, change.orientation, (num_rows, num_columns))
    magnitude = read(change.magnitude).float() if change.magnitude else None
    rounds_product = change.orientation is Orientation.EMBEDDING or change.part is not None
    # After the part was taken: widening the factors of all experts again for each would take longer than the merge.
    return Factors(a.float(), b.float(), magnitude, change.scaling, change.orientation, rounds_product)
