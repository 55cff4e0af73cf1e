"""Moves the bytes of a MergePlan: large sequential reads, blocks through arithmetic.py, writes in place. Bounded memory.

In: shards and their files (shard_file.py). Out: filled shards and their sha256. Called by run.py.
Shape:  pieces in output order -> workers (pread, compute, pwrite into a buffer of their own)
        -> this thread, in the same order: hash, progress, buffer handed back.
Hashing needs the order and writing does not, so a slow piece holds up only the hash. At most workers + 1 buffers exist.
Invariant: memory is the buffers, one block's fp32 temporaries per worker and the factors of the weights in flight, never
a weight, except those that `whole_tensors` in the result names.
"""

import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from finetune_trainer.merge import arithmetic
from finetune_trainer.merge.arithmetic import TORCH_DTYPES, Factors, Scratch
from finetune_trainer.merge.errors import BrokenCheckpointError, NotFiniteError
from finetune_trainer.merge.headers import DTYPE_BYTES, TensorHeader
from finetune_trainer.merge.plan import OutputTensor, Shard
from finetune_trainer.merge.shard_file import PAGE_BYTES, ShardFile

PIECE_BYTES = 4 << 20
"""Bytes read at once. Large enough for full disk speed, small enough that buffers stay a small part of memory."""
MAX_WORKERS = 6
"""More gain little, as one thread hashes at about 2 GB/s, and each costs up to 50 MiB."""
WAITING_WORKERS = 2
"""Workers beyond the processors: some always wait for the disk."""


@dataclass(frozen=True)
class Piece:
    """Rows start..stop of an output tensor; for one-dimensional and plainly copied ones a row is one element."""

    tensor: OutputTensor
    file: ShardFile
    start: int
    stop: int
    row_elements: int
    factors: Factors | None
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    def num_elements(self) -> int:
        return (self.stop - self.start) * self.row_elements


@dataclass
class StreamResult:
    """What was done. `whole_tensors`: weights that could not be cut, hence held in memory whole."""

    sha256: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    whole_tensors: list[str] = field(default_factory=list)


class Sources:
    """Open input files, by path."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def read_into(self, tensor: TensorHeader, first_byte: int, target: memoryview) -> None:
        """Fills `target` from the tensor's bytes. Raises BrokenCheckpointError when the file ends early."""
        done = 0
        while done < len(target):
            count = os.preadv(self._open(tensor.file), [target[done:]], tensor.offset + first_byte + done)
            if count == 0:
                raise BrokenCheckpointError(f"{tensor.file}: ended inside tensor {tensor.name} while it was read.")
            done += count

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def open_all(self, paths: set[Path]) -> None:
        """Opens every file once, before threads begin to read."""
        for path in sorted(paths):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._descriptors[path] = descriptor

    def _open(self, path: Path) -> int:
        return self._descriptors[path]


class Workspace:
    """What one worker needs for one piece: page-aligned bytes for input and output, and fp32 blocks."""

    def __init__(self) -> None:
        self.data = mmap.mmap(-1, 2 * PIECE_BYTES)
        self.scratch = Scratch()

    def grow(self, num_bytes: int) -> None:
        """Replaces the bytes by at least so many. No view of the old ones may be in use."""
        if len(self.data) < num_bytes:
            self.data.close()
            self.data = mmap.mmap(-1, num_bytes)


def stream(
    files: Mapping[Shard, ShardFile], progress: Callable[[int, int], None] | None, num_workers: int | None = None
) -> StreamResult:
    """Fills every shard's file. progress: called with (bytes done, bytes in all).

    Raises NotFiniteError naming the tensor, BrokenCheckpointError, OSError.
    """
    workers = num_workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)) + WAITING_WORKERS)
    total = sum(tensor.num_bytes for shard in files for tensor in shard.tensors)
    result = StreamResult()
    sources = Sources()
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the workers are the parallelism
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        sources.open_all({path for shard in files for tensor in shard.tensors for path in _files(tensor)})
        workspaces: deque[Workspace] = deque(Workspace() for _ in range(workers + 1))
        in_flight: deque[Future[_Done]] = deque()
        digests = {shard.file_name: hashlib.sha256(shard.header) for shard in files}

        def finish_one() -> None:
            done = in_flight.popleft().result()
            digests[done.piece.file.path.name].update(done.output)
            result.bytes_written += len(done.output)
            result.bytes_read += done.bytes_read
            done.output.release()
            workspaces.append(done.workspace)
            if progress is not None:
                progress(result.bytes_written, total)

        for shard, file in files.items():
            for piece in _pieces(shard, file, sources, result):
                if not workspaces:
                    finish_one()
                in_flight.append(pool.submit(_run, piece, sources, workspaces.popleft()))
        while in_flight:
            finish_one()
        result.sha256 = {name: digest.hexdigest() for name, digest in digests.items()}
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        sources.close()
        torch.set_num_threads(previous_threads)
    return result


@dataclass(frozen=True)
class _Done:
    piece: Piece
    output: memoryview
    workspace: Workspace
    bytes_read: int


def _files(tensor: OutputTensor) -> set[Path]:
    low_rank = tensor.low_rank
    parts = [low_rank.a, low_rank.b, low_rank.magnitude] if low_rank else []
    return {tensor.source.file, *(part.file for part in parts if part)}


def _pieces(shard: Shard, file: ShardFile, sources: Sources, result: StreamResult) -> Iterator[Piece]:
    exact_shapes: dict[tuple[object, ...], bool] = {}
    for tensor in shard.tensors:
        width = max(DTYPE_BYTES[tensor.dtype], DTYPE_BYTES[tensor.source.dtype])
        if tensor.low_rank is None:
            count = tensor.num_bytes // DTYPE_BYTES[tensor.dtype]
            step = PIECE_BYTES // width
            for start in range(0, count, step):
                yield Piece(tensor, file, start, min(start + step, count), 1, None)
            continue
        factors = _factors(tensor, sources)
        num_rows, columns = tensor.shape
        shape = (factors.orientation, factors.a.shape, factors.b.shape)
        if shape not in exact_shapes:
            exact_shapes[shape] = arithmetic.blocks_are_exact(factors)
        if factors.needs_whole_weight or not exact_shapes[shape]:
            result.whole_tensors.append(tensor.name)
            yield Piece(tensor, file, 0, num_rows, columns, factors, ((0, num_rows),))
            continue
        group: list[tuple[int, int]] = []
        for block in arithmetic.row_blocks(num_rows, columns):
            if group and (block[1] - group[0][0]) * columns * width > PIECE_BYTES:
                yield Piece(tensor, file, group[0][0], group[-1][1], columns, factors, tuple(group))
                group = []
            group.append(block)
        yield Piece(tensor, file, group[0][0], group[-1][1], columns, factors, tuple(group))


def _factors(tensor: OutputTensor, sources: Sources) -> Factors:
    low_rank = tensor.low_rank
    if low_rank is None:
        raise ValueError(f"{tensor.name} has no adapter")

    def load(part: TensorHeader) -> torch.Tensor:
        data = bytearray(part.num_bytes)
        sources.read_into(part, 0, memoryview(data))
        return torch.frombuffer(data, dtype=TORCH_DTYPES[part.dtype]).view(part.shape).float()

    magnitude = load(low_rank.magnitude) if low_rank.magnitude else None
    return Factors(load(low_rank.a), load(low_rank.b), magnitude, low_rank.scaling, low_rank.orientation)


def _run(piece: Piece, sources: Sources, workspace: Workspace) -> _Done:
    """One piece in a worker: read, compute, write. The output's bytes stay in the workspace until they are hashed."""
    tensor = piece.tensor
    in_width, out_width = DTYPE_BYTES[tensor.source.dtype], DTYPE_BYTES[tensor.dtype]
    in_bytes, out_bytes = piece.num_elements * in_width, piece.num_elements * out_width
    first = piece.start * piece.row_elements
    position = tensor.offset + first * out_width
    is_plain = piece.factors is None and tensor.dtype == tensor.source.dtype
    # The output's address agrees with its file position modulo the page size, as direct writes want it.
    in_at = position % PAGE_BYTES if is_plain else 0
    out_at = in_at if is_plain else -(-in_bytes // PAGE_BYTES) * PAGE_BYTES + position % PAGE_BYTES
    workspace.grow(out_at + out_bytes)
    view = memoryview(workspace.data)
    source, output = view[in_at : in_at + in_bytes], view[out_at : out_at + out_bytes]
    sources.read_into(tensor.source, first * in_width, source)
    if not is_plain:
        _compute(piece, source, output, workspace.scratch)
    piece.file.write(output, position)
    view.release()
    source.release()
    return _Done(piece, output, workspace, in_bytes)


def _compute(piece: Piece, source: memoryview, output: memoryview, scratch: Scratch) -> None:
    tensor, factors = piece.tensor, piece.factors
    shape = (piece.stop - piece.start, piece.row_elements)
    base = torch.frombuffer(source, dtype=TORCH_DTYPES[tensor.source.dtype]).view(shape)
    out = torch.frombuffer(output, dtype=TORCH_DTYPES[tensor.dtype]).view(shape)
    compute = TORCH_DTYPES[tensor.compute_dtype]
    if factors is None:
        arithmetic.cast(base, compute, out)
        is_finite = not tensor.is_replaced or arithmetic.all_finite(out)
    elif factors.needs_whole_weight:
        arithmetic.merge_whole_transposed_dora(base, factors, compute, out)
        is_finite = arithmetic.all_finite(out)
    else:
        is_finite = True
        for start, stop in piece.blocks:
            rows = slice(start - piece.start, stop - piece.start)
            is_finite &= arithmetic.merge_block(base[rows], factors, (start, stop), compute=compute, out=out[rows], scratch=scratch)
    if not is_finite:
        raise NotFiniteError(
            f"{tensor.name}: merged rows {piece.start} to {piece.stop} hold NaN or infinite values. The adapter diverged "
            f"in training, or {tensor.dtype} cannot hold the result; use an earlier checkpoint or a wider merge dtype."
        )
