"""Moves the bytes of a MergePlan: large sequential reads, rows through `steps`, writes in place. Bounded memory.

In: shards and their files (shard_file.py). Out: filled shards and their sha256. Called by merge_adapter.py.

Shape:  a thread for each of some shards: chunks in the order of the file (chunks.py)
  -> workers, shared by all (pread and compute in a buffer of the chunk's own)
  -> the shard's thread, in the same order: hash
  -> the shard's other thread, in the same order: pwrite; the buffer is handed back, and progress reported
  -> one thread that syncs what is written and records it in the journal (journal_writer.py).

A slow chunk holds up only its shard.

Invariant: memory is the buffers, one block's fp32 temporaries per worker and the factors of the weights in flight, never a
weight, except those that `whole_tensors` in the result names, one at a time.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer.merge.changes import Change, ModuleMerge, read_by
from finetune_trainer.merge.chunks import CHUNK_BYTES, Chunker, RowChunk
from finetune_trainer.merge.journal import Durable, Journal
from finetune_trainer.merge.journal_writer import JournalWriter
from finetune_trainer.merge.plan import OutputTensor, Shard
from finetune_trainer.merge.shard_file import PAGE_BYTES, ShardFile
from finetune_trainer.merge.sources import Sources
from finetune_trainer.merge.workspaces import Workspace, Workspaces
from finetune_trainer.processes.start import preload

if TYPE_CHECKING:
    from finetune_trainer.merge.compute import StepLoader
    from finetune_trainer.merge.steps.step import Step

WORKERS_PER_SHARD = 6
"""More workers gain little, as one thread hashes at about 2 GB/s, and each costs up to 50 MiB."""
WORKSPACES_PER_SHARD = 3
"""Buffers beyond one for each worker: for chunks that wait for the hash, are hashed, are written."""
MAX_SHARDS_AT_A_TIME = 4
PROCESSORS_PER_SHARD = 2
"""Processors for each shard: one for the hash, the others for workers."""
WAITING_WORKERS = 1
"""Workers beyond the processors: one may wait for the disk."""

ProgressCallback = Callable[[int, int], None]


@dataclass
class StreamResult:
    """Figures of the stream. bytes_written: into shards, without bytes_resumed, which an earlier merge had written."""

    sha256: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_resumed: int = 0
    whole_tensors: list[str] = field(default_factory=list)


class _StreamProgress:
    """Counts and reports the existing bytes of shards, from one thread at a time."""

    def __init__(self, files: Mapping[Shard, ShardFile], result: StreamResult, callback: ProgressCallback | None) -> None:
        self._reached, self._total = sum(file.num_done for file in files.values()), sum(shard.num_bytes for shard in files)
        self._result, self._told, self._lock = result, callback, threading.Lock()
        result.bytes_resumed = sum(file.num_done for file in files.values() if file.is_resumed)
        result.bytes_written = self._reached - result.bytes_resumed

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._reached += num_bytes
            self._result.bytes_written += num_bytes
            if self._told is not None:
                self._told(self._reached, self._total)


class _LazySteps:
    """Loads steps, which needs torch, once the first matrix needs one. `meanwhile` is called before waiting for that import."""

    def __init__(self, sources: Sources, device: str, may_compute: threading.Event) -> None:
        self._sources, self._device, self._may_compute = sources, device, may_compute
        self.meanwhile: Callable[[], None] = lambda: None

    @cached_property
    def _loader(self) -> StepLoader:
        self.meanwhile()
        self._may_compute.wait()
        from finetune_trainer.merge.compute import StepLoader

        return StepLoader(self._sources, self._device)

    def __call__(self, tensor: OutputTensor, change: Change) -> Step:
        return self._loader(tensor, change)


def stream(
    files: Mapping[Shard, ShardFile],
    journal: Journal,
    progress: ProgressCallback | None,
    *,
    device: str = "cpu",
    num_workers: int | None = None,
) -> StreamResult:
    """Fill every shard's file and make it durable.

    progress: called with (existing bytes of shards, bytes in all), from one thread at a time.
    Raises NotFiniteError naming the tensor, BrokenCheckpointError, StorageError, DeviceUnavailableError.
    """
    num_processors = len(os.sched_getaffinity(0))
    at_a_time = max(1, min(len(files), MAX_SHARDS_AT_A_TIME, num_processors // PROCESSORS_PER_SHARD))
    workers = num_workers or min(WORKERS_PER_SHARD * at_a_time, num_processors + WAITING_WORKERS)
    result = StreamResult()
    sources = Sources({path for shard in files for tensor in shard.tensors for path in _input_files(tensor)})
    # A thread that limits itself to one torch thread also changes torch's answer for other threads, so the number is read first.
    may_compute = threading.Event()
    lazy_steps = [_LazySteps(sources, device, may_compute) for _ in files]
    chunkers = [Chunker(steps) for steps in lazy_steps]
    stream_progress = _StreamProgress(files, result, progress)
    pool, shard_threads = ThreadPoolExecutor(workers), ThreadPoolExecutor(at_a_time)
    journal_writer = JournalWriter(journal)
    workspaces = Workspaces(workers + WORKSPACES_PER_SHARD * at_a_time)

    def fill(shard: Shard, chunker: Chunker, steps: _LazySteps, writer: ThreadPoolExecutor) -> None:
        """Fill one shard. writer: an executor with one thread."""
        file = files[shard]
        unhashed: deque[_InFlight] = deque()
        unwritten: deque[Future[None]] = deque()

        def submit(chunk: RowChunk, workspace: Workspace) -> None:
            unhashed.append(_InFlight(chunk, workspace, pool.submit(_compute_chunk, chunk, sources, workspace, may_compute)))

        def hash_next() -> None:
            while unwritten and unwritten[0].done():
                unwritten.popleft().result()
            done = unhashed.popleft()
            with done.computed.result()[done.chunk.position % PAGE_BYTES :] as values:
                file.digest.update(values)
            end = done.chunk.position + done.chunk.num_bytes
            is_noted = done.chunk.ends_matrix and journal_writer.wants(file, end)
            unwritten.append(writer.submit(write, done, Durable(end, file.digest.hexdigest()) if is_noted else None))

        def write(done: _InFlight, noted: Durable | None) -> None:
            try:
                with done.computed.result() as pages:
                    file.append(pages, done.chunk.position)
                if noted is not None:
                    file.flush()
                    journal_writer.note(file, noted)
                stream_progress.add(done.chunk.num_bytes)
            finally:
                workspaces.give(Workspace() if _is_large(done.chunk) else done.workspace)

        def finish() -> None:
            while unhashed:
                hash_next()
            while unwritten:
                unwritten.popleft().result()

        steps.meanwhile = finish
        for chunk in chunker.chunks(shard, file):
            if _is_large(chunk):
                finish()
                with workspaces.alone() as workspace:
                    submit(chunk, workspace)
                    finish()
                continue
            while (free := workspaces.take(wait=not unhashed)) is None:
                hash_next()
            submit(chunk, free)
        finish()

    def fill_and_write(shard: Shard, chunker: Chunker, steps: _LazySteps) -> None:
        with ThreadPoolExecutor(1) as writer:
            fill(shard, chunker, steps, writer)

    try:
        filling = [shard_threads.submit(fill_and_write, *of_shard) for of_shard in zip(files, chunkers, lazy_steps, strict=True)]
        # Imported while the first chunks are copied and hashed; unchanged chunks need no more.
        preload("finetune_trainer.merge.compute")
        from finetune_trainer.processes.torch_threads import one_thread_for_each_operation

        with one_thread_for_each_operation():  # the workers are the parallelism
            may_compute.set()
            done, _ = wait(filling, return_when=FIRST_EXCEPTION)
        failures = [error for future in done if (error := future.exception()) is not None]
        if failures:
            raise failures[0]
        journal_writer.wait()
        result.sha256 = {shard.file_name: file.digest.hexdigest() for shard, file in files.items()}
    finally:
        workspaces.stop()
        may_compute.set()
        shard_threads.shutdown(wait=True, cancel_futures=True)
        pool.shutdown(wait=True, cancel_futures=True)
        journal_writer.close()
        sources.close()
    result.bytes_read = sources.bytes_read
    result.whole_tensors = [name for chunker in chunkers for name in chunker.whole_tensors]
    return result


@dataclass(frozen=True)
class _InFlight:
    """A chunk on its way. computed: the result of `_compute_chunk`."""

    chunk: RowChunk
    workspace: Workspace
    computed: Future[memoryview]


def _is_large(chunk: RowChunk) -> bool:
    """Whether the chunk needs buffers far beyond the usual size: then it is alone in memory, and its buffers are freed."""
    return chunk.source_bytes + chunk.num_bytes > 6 * CHUNK_BYTES


def _input_files(tensor: OutputTensor) -> set[Path]:
    changes = [change for of_matrix in tensor.changes for change in of_matrix]
    modules = [header.file for change in changes if isinstance(change, ModuleMerge) for header in change.base.values()]
    return {tensor.source.file, *modules, *(header.file for change in changes for header in read_by(change))}


def _compute_chunk(chunk: RowChunk, sources: Sources, workspace: Workspace, may_compute: threading.Event) -> memoryview:
    """Read and compute one chunk in a worker. Returns the output's bytes in the workspace, as `ShardFile.append` takes them."""
    tensor = chunk.tensor
    # An adapter's tensors have to be checked for NaN and infinity.
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
