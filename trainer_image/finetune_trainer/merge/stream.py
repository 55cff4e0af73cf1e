"""Moves the bytes of a merge in bounded memory: reads chunks, passes their rows through `steps`, and writes them to the shards.

Called by merge_adapter.py. Several shards are filled at the same time. A chunk passes through these threads:

  the shard's thread cuts the shard into chunks, in the order of the file (chunks.py)
  -> a worker, shared by all shards, reads and computes the chunk in a buffer
  -> the shard's thread hashes the chunks, in the order of the file
  -> the shard's second thread writes them in the same order, returns the buffer and reports progress. After every
     JOURNAL_BYTES it syncs the file and records the durable bytes in the journal.

So a slow chunk delays only its own shard.

Memory holds the buffers, the fp32 temporaries of one block per worker, and the factors of the weights that are being computed. It
never holds a whole weight, except those that `whole_tensors` in the result names, one at a time.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finetune_trainer.merge.changes import Change, ModuleMerge, read_by
from finetune_trainer.merge.chunks import RowChunk, chunks
from finetune_trainer.merge.journal import Durable, Journal
from finetune_trainer.merge.plan import OutputTensor, Shard
from finetune_trainer.merge.shard_file import PAGE_BYTES, ShardFile
from finetune_trainer.merge.sources import Sources
from finetune_trainer.merge.workspaces import Workspace, Workspaces
from finetune_trainer.processes.start import preload

if TYPE_CHECKING:
    from finetune_trainer.merge.compute import StepLoader
    from finetune_trainer.merge.steps.step import Step

WORKERS_PER_SHARD = 6
"""Maximum number of workers per shard. More gain little, as one thread hashes only about 2 GB/s; each takes up to 50 MiB."""
WORKSPACES_PER_SHARD = 3
"""Number of buffers in addition to one per worker, for chunks that wait to be hashed, are being hashed, or are being written."""
MAX_SHARDS_AT_A_TIME = 4
PROCESSORS_PER_SHARD = 2
"""Number of processors needed for each shard that is filled at the same time: one for hashing, the others for workers."""
WAITING_WORKERS = 1
"""Number of workers in addition to one per processor, because a worker may wait for the disk."""

JOURNAL_BYTES = 1 << 30
"""Minimum number of bytes of a shard between two records. A killed merge must repeat at most these and one matrix per shard."""

ProgressCallback = Callable[[int, int], None]


@dataclass
class StreamResult:
    """The results of the stream. bytes_written: excludes bytes_resumed, which an earlier merge wrote."""

    sha256: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_resumed: int = 0
    whole_tensors: list[str] = field(default_factory=list)


class _StreamProgress:
    """Counts the bytes of shards that exist so far, and reports them from one thread at a time."""

    def __init__(self, files: Mapping[Shard, ShardFile], result: StreamResult, callback: ProgressCallback | None) -> None:
        self._reached, self._total = sum(file.num_done for file in files.values()), sum(shard.num_bytes for shard in files)
        self._result, self._callback, self._lock = result, callback, threading.Lock()
        result.bytes_resumed = sum(file.num_done for file in files.values() if file.is_resumed)
        result.bytes_written = self._reached - result.bytes_resumed

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._reached += num_bytes
            self._result.bytes_written += num_bytes
            if self._callback is not None:
                self._callback(self._reached, self._total)


def stream(files: Mapping[Shard, ShardFile], journal: Journal, progress: ProgressCallback | None) -> StreamResult:
    """Fill every shard's file and make it durable.

    progress: called with (bytes of shards so far, bytes in total), from one thread at a time.
    Raises NotFiniteError, which names the tensor, BrokenCheckpointError and StorageError.
    """
    num_processors = len(os.sched_getaffinity(0))
    at_a_time = max(1, min(len(files), MAX_SHARDS_AT_A_TIME, num_processors // PROCESSORS_PER_SHARD))
    workers = min(WORKERS_PER_SHARD * at_a_time, num_processors + WAITING_WORKERS)
    result = StreamResult()
    tensors = [tensor for shard in files for tensor in shard.tensors]
    changes = [change for tensor in tensors for matrix in tensor.changes for change in matrix]
    modules = [header for change in changes if isinstance(change, ModuleMerge) for header in change.base.values()]
    headers = [*(tensor.source for tensor in tensors), *modules, *(header for change in changes for header in read_by(change))]
    sources = Sources({header.file for header in headers})
    # Workers may compute only after torch's number of threads is saved, because a worker's own limit changes it for all threads.
    may_compute = threading.Event()
    whole_tensors: dict[str, list[str]] = {shard.file_name: [] for shard in files}
    stream_progress = _StreamProgress(files, result, progress)
    pool, shard_threads = ThreadPoolExecutor(workers), ThreadPoolExecutor(at_a_time)
    workspaces = Workspaces(workers + WORKSPACES_PER_SHARD * at_a_time)

    def fill(shard: Shard, writer: ThreadPoolExecutor) -> None:
        """Fill one shard. writer: an executor with one thread."""
        file = files[shard]
        recorded = file.num_done
        loader: StepLoader | None = None
        unhashed: deque[_InFlight] = deque()
        unwritten: deque[Future[None]] = deque()

        def submit(chunk: RowChunk, workspace: Workspace) -> None:
            unhashed.append(_InFlight(chunk, workspace, pool.submit(_compute_chunk, chunk, sources, workspace, may_compute)))

        def hash_next() -> None:
            nonlocal recorded
            while unwritten and unwritten[0].done():
                unwritten.popleft().result()
            in_flight = unhashed.popleft()
            chunk = in_flight.chunk
            with in_flight.computed.result()[chunk.position % PAGE_BYTES :] as values:
                file.digest.update(values)
            end = chunk.position + chunk.num_bytes
            durable: Durable | None = None
            if chunk.ends_matrix and (end == file.num_bytes or end - recorded >= JOURNAL_BYTES):
                recorded, durable = end, Durable(end, file.digest.hexdigest())
            unwritten.append(writer.submit(write, in_flight, durable))

        def write(in_flight: _InFlight, durable: Durable | None) -> None:
            chunk = in_flight.chunk
            try:
                with in_flight.computed.result() as pages:
                    file.append(pages, chunk.position)
            finally:
                workspaces.give(Workspace() if chunk.is_large else in_flight.workspace)
            if durable is not None:
                file.sync()
                journal.record(file.path.name, durable)
            stream_progress.add(chunk.num_bytes)

        def finish() -> None:
            while unhashed:
                hash_next()
            while unwritten:
                unwritten.popleft().result()

        def load_step(tensor: OutputTensor, change: Change) -> Step:
            """Load a step. The first one has to wait until torch is imported."""
            nonlocal loader
            if loader is None:
                finish()
                may_compute.wait()
                from finetune_trainer.merge.compute import StepLoader

                loader = StepLoader(sources)
            return loader(tensor, change)

        for chunk in chunks(shard, file, load_step, whole_tensors[shard.file_name]):
            if chunk.is_large:
                finish()
                with workspaces.alone() as workspace:
                    submit(chunk, workspace)
                    finish()
                continue
            while (free := workspaces.take(wait=not unhashed)) is None:
                hash_next()
            submit(chunk, free)
        finish()

    def fill_and_write(shard: Shard) -> None:
        with ThreadPoolExecutor(1) as writer:
            fill(shard, writer)

    try:
        filling = [shard_threads.submit(fill_and_write, shard) for shard in files]
        # While this imports torch, the first chunks are copied and hashed: unchanged chunks do not need torch.
        preload("finetune_trainer.merge.compute")
        from finetune_trainer.processes.torch_threads import one_thread_for_each_operation

        with one_thread_for_each_operation():  # the workers provide the parallelism
            may_compute.set()
            ended, _ = wait(filling, return_when=FIRST_EXCEPTION)
        failures = [error for future in ended if (error := future.exception()) is not None]
        if failures:
            raise failures[0]
        result.sha256 = {shard.file_name: file.digest.hexdigest() for shard, file in files.items()}
    finally:
        workspaces.stop()
        may_compute.set()
        shard_threads.shutdown(wait=True, cancel_futures=True)
        pool.shutdown(wait=True, cancel_futures=True)
        sources.close()
    result.bytes_read = sources.bytes_read
    result.whole_tensors = [name for names in whole_tensors.values() for name in names]
    return result


@dataclass(frozen=True)
class _InFlight:
    """A chunk that a worker is computing or has computed. computed: the result of `_compute_chunk`."""

    chunk: RowChunk
    workspace: Workspace
    computed: Future[memoryview]


def _compute_chunk(chunk: RowChunk, sources: Sources, workspace: Workspace, may_compute: threading.Event) -> memoryview:
    """Read and compute one chunk in a worker. Return its bytes in the workspace, in the form that `ShardFile.append` takes."""
    tensor = chunk.tensor
    # An adapter's tensors have to be checked for NaN and infinity, so they do not count as plain copies.
    is_plain = not chunk.steps and tensor.dtype == tensor.source.dtype and not tensor.is_replaced
    lead = chunk.position % PAGE_BYTES
    first = 0 if is_plain else -(-chunk.source_bytes // PAGE_BYTES) * PAGE_BYTES
    source_at, output_at = lead if is_plain else 0, first + lead
    workspace.grow(output_at + chunk.num_bytes)
    with memoryview(workspace.data) as view:
        with view[source_at : source_at + chunk.source_bytes] as source:
            sources.read_into(tensor.source, chunk.source_position, source)
            if not is_plain:
                may_compute.wait()
                from finetune_trainer.merge.compute import compute_chunk

                compute_chunk(chunk, source, view[output_at : output_at + chunk.num_bytes])
        return view[first : output_at + chunk.num_bytes]
