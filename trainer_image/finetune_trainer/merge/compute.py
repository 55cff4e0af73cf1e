"""Loads the steps of a merge and computes chunks. This is the part of the stream that needs torch.

stream.py imports this module while it copies bytes that need no arithmetic, because importing torch takes as long as the rest of
a small model's merge.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import torch

from finetune_trainer.merge.changes import Change, LowRank
from finetune_trainer.merge.chunks import RowChunk
from finetune_trainer.merge.plan import OutputTensor
from finetune_trainer.merge.sources import Sources
from finetune_trainer.merge.steps.load import load_step
from finetune_trainer.merge.steps.step import Scratch, Step
from finetune_trainer.weights.errors import NotFiniteError
from finetune_trainer.weights.rounding import TORCH_DTYPES, all_finite, round_into

SHARED_FACTORS = 8
"""Number of adapter tensors that stay in memory because many matrices need them: A and B of two adapters, each on the two
parameters of an expert, whose stored parts alternate in a file.
"""
BETWEEN_STEPS = (3, 4)
"""Indices of the two scratch blocks that take turns holding the values between steps."""

_of_thread = threading.local()


class StepLoader:
    """Loads the steps of one shard, in the order of its matrices."""

    def __init__(self, sources: Sources) -> None:
        self._read = sources.tensor
        self._read_shared = lru_cache(SHARED_FACTORS)(sources.tensor)

    def __call__(self, tensor: OutputTensor, change: Change) -> Step:
        use_one_thread()
        # PEFT keeps the factors of all experts in one tensor, which many matrices need one after the other.
        is_shared = isinstance(change, LowRank) and change.part is not None and change.part.num_experts > 1
        read = self._read_shared if is_shared else self._read
        return load_step(change, *tensor.matrix_shape, TORCH_DTYPES[tensor.compute_dtype], read)


def compute_chunk(chunk: RowChunk, source: memoryview, output: memoryview) -> None:
    """Write the chunk's values to `output`. source: the chunk's stored bytes. Raises NotFiniteError, which names the tensor."""
    use_one_thread()
    tensor, scratch = chunk.tensor, _scratch_of_thread()
    shape = (chunk.stop - chunk.start, chunk.num_columns)
    base = torch.frombuffer(source, dtype=TORCH_DTYPES[tensor.source.dtype]).view(shape)
    out = torch.frombuffer(output, dtype=TORCH_DTYPES[tensor.dtype]).view(shape)
    compute = TORCH_DTYPES[tensor.compute_dtype]
    is_finite = True
    if not chunk.steps:
        round_into(base, compute, out)
        is_finite = not tensor.is_replaced or all_finite(out)
    for cut in chunk.cuts:
        rows = slice(cut.rows[0] - chunk.start, cut.rows[1] - chunk.start)
        values = base[rows]
        num_rows, num_columns = values.shape
        for number, (step, of_step) in enumerate(zip(chunk.steps, cut.blocks, strict=True)):
            is_last = number == len(chunk.steps) - 1
            target = out[rows] if is_last else scratch.block(BETWEEN_STEPS[number % 2], num_rows, num_columns, compute)
            for start, stop in of_step:
                block = slice(start - cut.rows[0], stop - cut.rows[0])
                is_finite &= step.apply(values[block], (start, stop), target[block], scratch)
            values = target
    if not is_finite:
        raise NotFiniteError(
            f"{tensor.name}: merged rows {chunk.start} to {chunk.stop} hold NaN or infinite values. The adapter diverged "
            f"in training, or {tensor.dtype} cannot hold the result; use an earlier checkpoint or a wider merge dtype."
        )


def use_one_thread() -> None:
    """Make torch run this thread's operations on this thread only, because the stream already uses several threads."""
    if not hasattr(_of_thread, "is_limited"):
        torch.set_num_threads(1)
        _of_thread.is_limited = True


def _scratch_of_thread() -> Scratch:
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = Scratch()
    scratch: Scratch = _of_thread.scratch
    return scratch
