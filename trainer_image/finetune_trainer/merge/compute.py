"""The part of the stream that needs torch: steps with their tensors in memory, and the arithmetic of a chunk.

stream.py imports this module while bytes that need no arithmetic are copied: an import of torch takes as long as the rest of a
small model's merge.
"""

from __future__ import annotations

import threading

import torch

from finetune_trainer.merge.changes import Change, LowRank
from finetune_trainer.merge.chunks import RowChunk
from finetune_trainer.merge.plan import OutputTensor
from finetune_trainer.merge.sources import Sources
from finetune_trainer.merge.steps.load import load_step
from finetune_trainer.merge.steps.step import OnDevice, Scratch, Step, require_device
from finetune_trainer.weights.errors import NotFiniteError
from finetune_trainer.weights.rounding import TORCH_DTYPES, all_finite, round_into

SHARED_FACTORS = 8
"""Number of adapter tensors with the factors of many matrices that are held at once: A and B of two adapters for an expert's two
parameters, whose stored parts alternate in a file.
"""
HOST = torch.device("cpu")
"""Device of all computations except, on demand, the products of factors."""

_of_thread = threading.local()


class StepLoader:
    """Makes the steps of one shard, in the order of its matrices.

    device: of the products of factors. Raises DeviceUnavailableError.
    """

    def __init__(self, sources: Sources, device: str) -> None:
        self._sources, self._device = sources, require_device(device)
        self._read = sources.reader(keeps=0, device=self._device)
        self._shared = sources.reader(keeps=SHARED_FACTORS, device=self._device)

    def __call__(self, tensor: OutputTensor, change: Change) -> Step:
        use_one_thread()
        compute = TORCH_DTYPES[tensor.compute_dtype]
        if not isinstance(change, LowRank):
            return load_step(change, *tensor.matrix_shape, compute, self._sources.tensor)
        # PEFT keeps the factors of all experts in one tensor, which many matrices need one after the other.
        is_shared = change.part is not None and change.part.num_experts > 1
        step = load_step(change, *tensor.matrix_shape, compute, self._shared if is_shared else self._read)
        return step if self._device == HOST else OnDevice(step, self._device)


class Blocks:
    """A thread's buffers, which are reused for each chunk."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self._between = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

    def between(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Block `number` (0 or 1) for the values between two steps, contents undefined."""
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        if len(self._between[number]) < num_bytes:
            self._between[number] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._between[number][:num_bytes].view(dtype).view(shape)


def compute_chunk(chunk: RowChunk, source: memoryview, output: memoryview) -> None:
    """Write the chunk's values to `output`. source: its bytes as stored. Raises NotFiniteError naming the tensor."""
    use_one_thread()
    tensor, blocks = chunk.tensor, _blocks()
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
        for number, (step, of_step) in enumerate(zip(chunk.steps, cut.blocks, strict=True)):
            is_last = number == len(chunk.steps) - 1
            target = out[rows] if is_last else blocks.between(number % 2, values.shape, compute)
            for start, stop in of_step:
                block = slice(start - cut.rows[0], stop - cut.rows[0])
                is_finite &= step.apply(values[block], (start, stop), target[block], blocks.scratch)
            values = target
    if not is_finite:
        raise NotFiniteError(
            f"{tensor.name}: merged rows {chunk.start} to {chunk.stop} hold NaN or infinite values. The adapter diverged "
            f"in training, or {tensor.dtype} cannot hold the result; use an earlier checkpoint or a wider merge dtype."
        )


def use_one_thread() -> None:
    """Use one thread for each operation of this thread: the stream's threads are the parallelism."""
    if not hasattr(_of_thread, "is_limited"):
        torch.set_num_threads(1)
        _of_thread.is_limited = True


def _blocks() -> Blocks:
    if not hasattr(_of_thread, "blocks"):
        _of_thread.blocks = Blocks()
    blocks: Blocks = _of_thread.blocks
    return blocks
