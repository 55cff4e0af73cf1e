"""Moves the bytes of a MergePlan: large sequential reads, rows through `steps`, writes in place. Bounded memory.

In: shards and their files (shard_file.py). Out: filled shards and their sha256. Called by merge_adapter.py.
Shape:  a thread for each of some shards: chunks in the order of the file (chunks.py)
        -> workers, shared by all (pread, compute, pwrite into a buffer of their own)
        -> the shard's thread, in the same order: hash, progress, buffer handed back
        -> one thread that syncs what is hashed and notes it in the journal.
Hashing needs the order and writing does not, so a slow chunk holds up only its shard's hash. At most workers + shards at a time
buffers exist.
Invariant: memory is the buffers, one block's fp32 temporaries per worker and the factors of the weights in flight, never
a weight, except those that `whole_tensors` in the result names, one at a time.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from finetune_trainer.merge.changes import ModuleMerge, read_by
from finetune_trainer.merge.chunks import CHUNK_BYTES, Chunker, RowChunk
from finetune_trainer.merge.journal import Durable, Journal
from finetune_trainer.merge.plan import OutputTensor, Shard
from finetune_trainer.merge.shard_file import PAGE_BYTES, ShardFile
from finetune_trainer.merge.sources import Sources
from finetune_trainer.merge.steps.step import Scratch, require_device
from finetune_trainer.processes.torch_threads import one_thread_for_each_operation
from finetune_trainer.weights.errors import NotFiniteError
from finetune_trainer.weights.rounding import TORCH_DTYPES, all_finite, round_into

WORKERS_PER_SHARD = 6
"""More gain little, as one thread hashes at about 2 GB/s, and each costs up to 50 MiB."""
MAX_SHARDS_AT_A_TIME = 4
PROCESSORS_PER_SHARD = 2
"""One is taken by the hash, the others by workers."""
WAITING_WORKERS = 2
"""Workers beyond the processors: some always wait for the disk."""
JOURNAL_BYTES = 1 << 30
"""Of a shard that are synced and noted at once, at the end of a matrix: of each, a kill costs that and one matrix at most."""

ProgressCallback = Callable[[int, int], None]


@dataclass
class StreamResult:
    """What was done. bytes_written: into shards; what an earlier merge had finished is bytes_resumed."""

    sha256: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_resumed: int = 0
    whole_tensors: list[str] = field(default_factory=list)


class Workspace:
    """What one worker needs for one chunk: page-aligned bytes for input and output, and fp32 blocks."""

    def __init__(self) -> None:
        self.data = mmap.mmap(-1, 2 * CHUNK_BYTES)
        self.scratch = Scratch()
        self._between = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

    def grow(self, num_bytes: int) -> None:
        """Replaces the bytes by at least so many. No view of the old ones may be in use."""
        if len(self.data) < num_bytes:
            self.data.close()
            self.data = mmap.mmap(-1, num_bytes)

    def between(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Block `number` (0 or 1) for what one step hands to the next, contents undefined."""
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        if len(self._between[number]) < num_bytes:
            self._between[number] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._between[number][:num_bytes].view(dtype).view(shape)


class JournalWriter:
    """Syncs shards and notes in the journal what is durable, in a thread of its own, in the order of `note` and `finish`.

    Safe to use from several threads, one for each file.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()
        self._noted: dict[str, int] = {}

    def note(self, file: ShardFile, num_bytes: int) -> None:
        """All bytes before `num_bytes` are written and in `file.digest`: make that known if it is worth it."""
        with self._lock:
            self._raise_failures(wait=False)
            if not self._pending and num_bytes - self._noted.setdefault(file.path.name, file.num_done) >= JOURNAL_BYTES:
                self._submit(file, num_bytes)

    def finish(self, file: ShardFile) -> None:
        """All bytes of the file are written and in its digest."""
        with self._lock:
            self._raise_failures(wait=False)
            self._submit(file, file.num_bytes)

    def wait(self) -> None:
        """Until everything is durable. Raises StorageError."""
        self._raise_failures(wait=True)

    def close(self) -> None:
        """After a failure, too, what is written gets noted."""
        self._thread.shutdown(wait=True)

    def _submit(self, file: ShardFile, num_bytes: int) -> None:
        durable = Durable(num_bytes, file.digest.hexdigest())
        self._noted[file.path.name] = num_bytes
        self._pending.append(self._thread.submit(self._sync, file, durable))

    def _sync(self, file: ShardFile, durable: Durable) -> None:
        file.sync()
        self._journal.record(file.path.name, durable)

    def _raise_failures(self, *, wait: bool) -> None:
        while self._pending and (wait or self._pending[0].done()):
            self._pending.popleft().result()


class Workspaces:
    """Those that no chunk is in, for several threads. Raises _OtherShardFailedError in all of them after `stop`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = deque(Workspace() for _ in range(count))
        self._changed = threading.Condition()
        self._is_reserved = self._is_stopped = False
        self._alone = threading.Lock()

    def take(self, *, wait: bool) -> Workspace | None:
        """One, or None if there is none and the caller does not wait."""
        with self._changed:
            while (self._is_reserved or not self._free) and wait and not self._is_stopped:
                self._changed.wait()
            if self._is_stopped:
                raise _OtherShardFailedError
            return self._free.popleft() if self._free and not self._is_reserved else None

    def give(self, workspace: Workspace) -> None:
        with self._changed:
            self._free.append(workspace)
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[Workspace]:
        """One, once the other threads have given theirs back, while they get none. The caller has none and gives it back."""
        with self._alone:
            with self._changed:
                self._is_reserved = True
                while len(self._free) < self._count and not self._is_stopped:
                    self._changed.wait()
                if self._is_stopped:
                    raise _OtherShardFailedError
                workspace = self._free.popleft()
            yield workspace
            with self._changed:
                self._is_reserved = False
                self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


class _OtherShardFailedError(Exception):
    """Another shard has failed."""


class _StreamProgress:
    """Bytes of shards that are there, said one at a time."""

    def __init__(self, files: Mapping[Shard, ShardFile], result: StreamResult, told: ProgressCallback | None) -> None:
        self._reached, self._total = sum(file.num_done for file in files.values()), sum(shard.num_bytes for shard in files)
        self._result, self._told, self._lock = result, told, threading.Lock()
        result.bytes_resumed = sum(file.num_done for file in files.values() if file.is_resumed)
        result.bytes_written = self._reached - result.bytes_resumed

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._reached += num_bytes
            self._result.bytes_written += num_bytes
            if self._told is not None:
                self._told(self._reached, self._total)


@one_thread_for_each_operation()  # the workers are the parallelism
def stream(
    files: Mapping[Shard, ShardFile],
    journal: Journal,
    progress: ProgressCallback | None,
    *,
    device: str = "cpu",
    num_workers: int | None = None,
) -> StreamResult:
    """Fills every shard's file and makes it durable. progress: called with (bytes of shards that are there, bytes in all), from
    one thread at a time.

    Raises NotFiniteError naming the tensor, BrokenCheckpointError, StorageError, DeviceUnavailableError.
    """
    num_processors = len(os.sched_getaffinity(0))
    at_a_time = max(1, min(len(files), MAX_SHARDS_AT_A_TIME, num_processors // PROCESSORS_PER_SHARD))
    workers = num_workers or min(WORKERS_PER_SHARD * at_a_time, num_processors + WAITING_WORKERS)
    result = StreamResult()
    on_device = require_device(device)
    sources = Sources({path for shard in files for tensor in shard.tensors for path in _input_files(tensor)})
    chunkers = [Chunker(sources, on_device) for _ in files]
    told = _StreamProgress(files, result, progress)
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    shard_threads = ThreadPoolExecutor(at_a_time, initializer=torch.set_num_threads, initargs=(1,))
    journal_writer = JournalWriter(journal)
    workspaces = Workspaces(workers + at_a_time)

    def fill(shard: Shard, chunker: Chunker) -> None:
        file = files[shard]
        in_flight: deque[Future[_FinishedChunk]] = deque()

        def finish_one() -> Workspace:
            done = in_flight.popleft().result()
            file.digest.update(done.output)
            done.output.release()
            end = done.chunk.position + done.chunk.num_bytes
            if end == file.num_bytes:
                journal_writer.finish(file)
            elif done.chunk.ends_matrix:
                journal_writer.note(file, end)
            told.add(done.chunk.num_bytes)
            return Workspace() if _is_large(done.chunk) else done.workspace

        for chunk in chunker.chunks(shard, file):
            if _is_large(chunk):
                while in_flight:
                    workspaces.give(finish_one())
                with workspaces.alone() as workspace:
                    in_flight.append(pool.submit(_process_chunk, chunk, sources, workspace))
                    workspaces.give(finish_one())
                continue
            while (free := workspaces.take(wait=not in_flight)) is None:
                workspaces.give(finish_one())
            in_flight.append(pool.submit(_process_chunk, chunk, sources, free))
        while in_flight:
            workspaces.give(finish_one())

    try:
        filling = [shard_threads.submit(fill, *of_shard) for of_shard in zip(files, chunkers, strict=True)]
        failures = [error for each in wait(filling, return_when=FIRST_EXCEPTION).done if (error := each.exception()) is not None]
        if failures:
            raise failures[0]
        journal_writer.wait()
        result.sha256 = {shard.file_name: file.digest.hexdigest() for shard, file in files.items()}
    finally:
        workspaces.stop()
        shard_threads.shutdown(wait=True, cancel_futures=True)
        pool.shutdown(wait=True, cancel_futures=True)
        journal_writer.close()
        sources.close()
    result.bytes_read = sources.bytes_read
    result.whole_tensors = [name for chunker in chunkers for name in chunker.whole_tensors]
    return result


@dataclass(frozen=True)
class _FinishedChunk:
    chunk: RowChunk
    output: memoryview
    workspace: Workspace


def _is_large(chunk: RowChunk) -> bool:
    """Whether it needs buffers far beyond the usual: then it is alone in memory, and its buffers are given back."""
    return chunk.source_bytes + chunk.num_bytes > 6 * CHUNK_BYTES


def _input_files(tensor: OutputTensor) -> set[Path]:
    changes = [change for of_matrix in tensor.changes for change in of_matrix]
    modules = [header.file for change in changes if isinstance(change, ModuleMerge) for header in change.base.values()]
    return {tensor.source.file, *modules, *(header.file for change in changes for header in read_by(change))}


def _process_chunk(chunk: RowChunk, sources: Sources, workspace: Workspace) -> _FinishedChunk:
    """One chunk in a worker: read, compute, write. The output's bytes stay in the workspace until they are hashed."""
    tensor = chunk.tensor
    position = chunk.position
    # What an adapter brings has yet to be looked at.
    is_plain = not chunk.steps and tensor.dtype == tensor.source.dtype and not tensor.is_replaced
    # The output's address agrees with its file position modulo the page size, as direct writes want it.
    in_at = position % PAGE_BYTES if is_plain else 0
    out_at = in_at if is_plain else -(-chunk.source_bytes // PAGE_BYTES) * PAGE_BYTES + position % PAGE_BYTES
    workspace.grow(out_at + chunk.num_bytes)
    view = memoryview(workspace.data)
    source, output = view[in_at : in_at + chunk.source_bytes], view[out_at : out_at + chunk.num_bytes]
    sources.read_into(tensor.source, chunk.source_position, source)
    if not is_plain:
        _compute(chunk, source, output, workspace)
    chunk.file.write(output, position)
    view.release()
    source.release()
    return _FinishedChunk(chunk, output, workspace)


def _compute(chunk: RowChunk, source: memoryview, output: memoryview, workspace: Workspace) -> None:
    tensor = chunk.tensor
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
        for number, (step, blocks) in enumerate(zip(chunk.steps, cut.blocks, strict=True)):
            is_last = number == len(chunk.steps) - 1
            target = out[rows] if is_last else workspace.between(number % 2, values.shape, compute)
            for start, stop in blocks:
                block = slice(start - cut.rows[0], stop - cut.rows[0])
                is_finite &= step.apply(values[block], (start, stop), target[block], workspace.scratch)
            values = target
    if not is_finite:
        raise NotFiniteError(
            f"{tensor.name}: merged rows {chunk.start} to {chunk.stop} hold NaN or infinite values. The adapter diverged "
            f"in training, or {tensor.dtype} cannot hold the result; use an earlier checkpoint or a wider merge dtype."
        )
