"""Cuts output tensors into chunks that fit a worker's buffers.

A chunk consists of rows of one matrix, which is a whole tensor or one expert of a stored stack. A matrix is cut only at rows
where all of its steps allow it, so that each chunk can go through all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune_trainer.merge.changes import Change
from finetune_trainer.merge.plan import OutputTensor, Shard
from finetune_trainer.merge.shard_file import ShardFile
from finetune_trainer.weights.headers import DTYPE_BYTES

if TYPE_CHECKING:
    # Imported for types only: the module imports torch, and the first chunks are made before torch is imported.
    from finetune_trainer.merge.steps.step import Step

CHUNK_BYTES = 4 << 20
"""Number of bytes that are read at a time: enough for the disk's full speed, and few enough for small buffers."""

Rows = tuple[int, int]


@dataclass(frozen=True)
class RowCut:
    """Rows that go through all steps together, and the blocks in which each step processes these rows."""

    rows: Rows
    blocks: tuple[tuple[Rows, ...], ...]


@dataclass(frozen=True)
class RowChunk:
    """The rows start..stop of a matrix of an output tensor. In matrices without changes, a row is one element."""

    tensor: OutputTensor
    file: ShardFile
    start: int
    stop: int
    num_columns: int
    first_element: int
    """Position of the matrix's first element in the tensor."""
    ends_matrix: bool
    """Whether this is the last chunk of its matrix. A resumed merge can start after it."""
    steps: tuple[Step, ...] = ()
    cuts: tuple[RowCut, ...] = ()
    """Empty if the values are copied."""

    @property
    def num_elements(self) -> int:
        return (self.stop - self.start) * self.num_columns

    @property
    def source_position(self) -> int:
        """Number of bytes from the start of the source tensor."""
        return (self.first_element + self.start * self.num_columns) * DTYPE_BYTES[self.tensor.source.dtype]

    @property
    def position(self) -> int:
        """Number of bytes from the start of the shard."""
        return self.tensor.offset + (self.first_element + self.start * self.num_columns) * DTYPE_BYTES[self.tensor.dtype]

    @property
    def source_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.tensor.source.dtype]

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.tensor.dtype]

    @property
    def is_large(self) -> bool:
        """Whether the chunk needs very large buffers. No other chunk is then in memory, and the buffers are freed afterwards."""
        return self.source_bytes + self.num_bytes > 6 * CHUNK_BYTES


def chunks(
    shard: Shard, file: ShardFile, load_step: Callable[[OutputTensor, Change], Step], whole_tensors: list[str]
) -> Iterator[RowChunk]:
    """Yield chunks in the order of the file, starting with the matrix in which the file's durable part ends.

    load_step: called for each change of a matrix, in the order of the file. whole_tensors: receives the names of tensors with a
    matrix that is computed in one piece, and is therefore held in memory as a whole.
    """
    for tensor in shard.tensors:
        num_rows, num_columns = tensor.matrix_shape if any(tensor.changes) else (tensor.num_bytes // DTYPE_BYTES[tensor.dtype], 1)
        num_elements = num_rows * num_columns
        width = max(DTYPE_BYTES[tensor.dtype], DTYPE_BYTES[tensor.source.dtype])
        for number, changes in enumerate(tensor.changes if any(tensor.changes) else ((),)):
            first = number * num_elements
            if tensor.offset + (first + num_elements) * DTYPE_BYTES[tensor.dtype] <= file.num_done:
                continue
            if not changes:
                for start in range(0, num_elements, CHUNK_BYTES // width):
                    stop = min(start + CHUNK_BYTES // width, num_elements)
                    yield RowChunk(tensor, file, start, stop, 1, first, stop == num_elements)
                continue
            steps = tuple(load_step(tensor, change) for change in changes)
            cuts = common_cuts([step.row_blocks(num_rows, num_columns) for step in steps])
            if len(cuts) == 1 and tensor.name not in whole_tensors[-1:]:
                whole_tensors.append(tensor.name)
            most_rows = max(1, CHUNK_BYTES // (width * max(num_columns, 1)))
            group: list[RowCut] = []
            for cut, following in zip(cuts, [*cuts[1:], None], strict=True):
                group.append(cut)
                start, stop = group[0].rows[0], cut.rows[1]
                if following is None or following.rows[1] - start > most_rows:
                    yield RowChunk(tensor, file, start, stop, num_columns, first, stop == num_rows, steps, tuple(group))
                    group = []


def common_cuts(blocks: list[list[Rows]]) -> list[RowCut]:
    """Cut rows wherever a block of every step ends.

    blocks: the blocks of each step, in order and without gaps. All steps cover the same rows.
    """
    ends = sorted(set.intersection(*({stop for _, stop in of_step} for of_step in blocks)))
    cuts, start = [], blocks[0][0][0]
    for stop in ends:
        inside = tuple(tuple(block for block in of_step if start <= block[0] and block[1] <= stop) for of_step in blocks)
        cuts.append(RowCut((start, stop), inside))
        start = stop
    return cuts
