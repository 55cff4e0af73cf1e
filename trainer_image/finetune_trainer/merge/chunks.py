"""Cuts output tensors into chunks that fit a worker's buffers.

A chunk is rows of one matrix: of a whole tensor, or of one expert in a stored stack. Rows are cut where every step of the matrix
allows it, so that one chunk goes through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finetune_trainer.merge.changes import Change
from finetune_trainer.merge.plan import OutputTensor, Shard
from finetune_trainer.merge.shard_file import ShardFile
from finetune_trainer.weights.headers import DTYPE_BYTES

if TYPE_CHECKING:
    # It imports torch, which may not be imported yet when the first chunks are made.
    from finetune_trainer.merge.steps.step import Step

CHUNK_BYTES = 4 << 20
"""Bytes that are read at a time. Large enough for full disk speed, small enough that buffers stay a small part of memory."""

Rows = tuple[int, int]


@dataclass(frozen=True)
class RowCut:
    """Rows that go through all steps together, and the blocks in which each step takes them."""

    rows: Rows
    blocks: tuple[tuple[Rows, ...], ...]


@dataclass(frozen=True)
class RowChunk:
    """Rows start..stop of a matrix of an output tensor. In tensors without changes, a row is one element."""

    tensor: OutputTensor
    file: ShardFile
    start: int
    stop: int
    num_columns: int
    first_element: int
    """First element of the matrix in the tensor."""
    ends_matrix: bool
    """Whether the file can be complete up to this chunk's end, so that later chunks do not depend on it."""
    steps: tuple[Step, ...] = ()
    cuts: tuple[RowCut, ...] = ()
    """Empty: the values are copied."""

    @property
    def num_elements(self) -> int:
        return (self.stop - self.start) * self.num_columns

    @property
    def source_position(self) -> int:
        """Bytes from the start of the source tensor."""
        return (self.first_element + self.start * self.num_columns) * DTYPE_BYTES[self.tensor.source.dtype]

    @property
    def position(self) -> int:
        """Bytes from the start of the shard."""
        return self.tensor.offset + (self.first_element + self.start * self.num_columns) * DTYPE_BYTES[self.tensor.dtype]

    @property
    def source_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.tensor.source.dtype]

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.tensor.dtype]


@dataclass
class Chunker:
    """Makes the chunks of shards.

    whole_tensors: tensors of which a matrix had to be computed at once, hence held in memory. load_step: called for each change
    of a matrix, in the order of the file.
    """

    load_step: Callable[[OutputTensor, Change], Step]
    whole_tensors: list[str] = field(default_factory=list)

    def chunks(self, shard: Shard, file: ShardFile) -> Iterator[RowChunk]:
        """Yield chunks in the order of the file, starting with the matrix in which the file's durable part ends."""
        for tensor in shard.tensors:
            if tensor.offset + tensor.num_bytes <= file.num_done:
                continue
            if any(tensor.changes):
                yield from self._matrices(tensor, file)
            else:
                count = tensor.num_bytes // DTYPE_BYTES[tensor.dtype]
                yield from _copies(tensor, file, count, 0)

    def _matrices(self, tensor: OutputTensor, file: ShardFile) -> Iterator[RowChunk]:
        num_rows, num_columns = tensor.matrix_shape
        num_elements = num_rows * num_columns
        for number, changes in enumerate(tensor.changes):
            first = number * num_elements
            if tensor.offset + (first + num_elements) * DTYPE_BYTES[tensor.dtype] <= file.num_done:
                continue
            if not changes:
                yield from _copies(tensor, file, num_elements, first)
                continue
            steps = tuple(self.load_step(tensor, change) for change in changes)
            cuts = common_cuts([step.row_blocks(num_rows, num_columns) for step in steps])
            if len(cuts) == 1 and tensor.name not in self.whole_tensors[-1:]:
                self.whole_tensors.append(tensor.name)
            width = max(DTYPE_BYTES[tensor.dtype], DTYPE_BYTES[tensor.source.dtype])
            for group in _grouped(cuts, max(1, CHUNK_BYTES // (width * max(num_columns, 1)))):
                start, stop = group[0].rows[0], group[-1].rows[1]
                yield RowChunk(tensor, file, start, stop, num_columns, first, stop == num_rows, steps, tuple(group))


def common_cuts(blocks: list[list[Rows]]) -> list[RowCut]:
    """The finest cuts at which a block of every step ends. blocks: per step, in order, without gaps, over the same rows."""
    ends = sorted(set.intersection(*({stop for _, stop in of_step} for of_step in blocks)))
    cuts, start = [], blocks[0][0][0]
    for stop in ends:
        inside = tuple(tuple(block for block in of_step if start <= block[0] and block[1] <= stop) for of_step in blocks)
        cuts.append(RowCut((start, stop), inside))
        start = stop
    return cuts


def _grouped(cuts: list[RowCut], most_rows: int) -> Iterator[list[RowCut]]:
    group: list[RowCut] = []
    for cut in cuts:
        if group and cut.rows[1] - group[0].rows[0] > most_rows:
            yield group
            group = []
        group.append(cut)
    yield group


def _copies(tensor: OutputTensor, file: ShardFile, count: int, first_element: int) -> Iterator[RowChunk]:
    step = CHUNK_BYTES // max(DTYPE_BYTES[tensor.dtype], DTYPE_BYTES[tensor.source.dtype])
    for start in range(0, count, step):
        stop = min(start + step, count)
        yield RowChunk(tensor, file, start, stop, 1, first_element, stop == count)
