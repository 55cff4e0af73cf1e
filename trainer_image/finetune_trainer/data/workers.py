"""Parts of files -> their results, in order, computed by several processes (worker.py) or by this one.

These are processes and not threads, because chat templates and JSON parsing hold Python's lock.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from socket import socket, socketpair

from finetune_job.failures import FailureClass
from finetune_trainer.data.file_parts import PartResult, PartTask, work_on
from finetune_trainer.data.messages import MAX_ANSWER_BYTES, WorkerFailure, read_answer, task_line
from finetune_trainer.data.records import RecordProblem
from finetune_trainer.data.render_chat import endless_template_error
from finetune_trainer.data.render_limit import END_SECONDS, ENDED_BY, RecordNote, new_note
from finetune_trainer.data.tokenize import Tokenizer
from finetune_trainer.errors import TrainerError
from finetune_trainer.processes.child import Child, ChildOutput, TooMuchOutputError, start

MAX_WORKERS = 8
"""Largest number of workers. Each has some tens of MB of its own."""
AHEAD = 4
"""Number of results per worker that may wait for an earlier one, on disk."""
EXIT_SECONDS = 60.0
"""Time that a process may take to end after its connection has closed."""
TAKING_SECONDS = 60.0
"""Time that an idle worker may take to read its next task."""
PART_SECONDS = 1800.0
SLOWEST_BYTES_PER_SECOND = 16 << 10
"""Added to PART_SECONDS, the time of a part's bytes at this speed, a hundredth of an old machine's, bounds the work on it."""
LAST_OUTPUT = 2000
"""Characters of a worker's output that an error shows."""


class WorkerError(TrainerError):
    """A process that prepares data ended before its work was done."""


class WorkerKilledError(WorkerError):
    """The process was ended by SIGKILL, which the kernel sends if memory runs out."""

    failure = FailureClass.HOST_OUT_OF_MEMORY


def in_this_process(tasks: Iterator[PartTask], tokenizer: Tokenizer | None) -> Generator[tuple[PartTask, PartResult]]:
    """Work on one task after the other. A chat template that does not finish may end this process."""
    for task in tasks:
        yield task, work_on(task, tokenizer)


class _Worker:
    """A process at the other end of a socket, its current task and the deadline for it."""

    def __init__(self, connection: socket, note: RecordNote) -> None:
        # ChildOutput makes the socket non-blocking for reading; this bounds the wait of writing.
        connection.settimeout(TAKING_SECONDS)
        self.note, self.output = note, ChildOutput(connection.fileno(), MAX_ANSWER_BYTES)
        self._connection, self._file, self._deadline = connection, Path(), 0.0

    def give(self, task: PartTask) -> None:
        """Send it a task. Raises WorkerError, ConnectionError."""
        self._file = task.part.path
        self._deadline = time.monotonic() + PART_SECONDS + task.part.num_bytes / SLOWEST_BYTES_PER_SECOND
        try:
            self._connection.sendall(task_line(task))
        except TimeoutError as error:
            raise WorkerError(f"a process that prepares data took no task within {TAKING_SECONDS:.0f} s") from error

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def result(self) -> PartResult | None:
        """Result of the task, or None if it is not there yet. Raises the worker's error, WorkerError, or EOFError if the worker
        has ended.
        """
        try:
            self.output.read()
            line = self.output.take_line()
            answer = None if line is None else read_answer(line, self._file)
        except (TooMuchOutputError, ValueError) as error:
            raise WorkerError("a process that prepares data wrote something else than a result") from error
        if isinstance(answer, WorkerFailure):
            raise answer.error or WorkerError(f"a process that prepares data failed:\n{answer.trace}")
        if answer is None and self.output.has_ended:
            raise EOFError
        if answer is None and not self.seconds_left:
            raise WorkerError(f"a process that prepares data came to no end with {self._file.name}")
        return answer

    def close(self) -> None:
        self._connection.close()
        os.close(self.note.descriptor)


def in_workers(
    tasks: Iterator[PartTask], num_workers: int, model_directory: Path, allow_remote_code: bool
) -> Generator[tuple[PartTask, PartResult]]:
    """Work on the tasks in `num_workers` processes; yields the results in order.

    Tasks are taken as workers become free, at most AHEAD * num_workers ahead of the oldest unfinished one. Raises a worker's
    error (OSError if it could not write), WorkerError if one died.
    """
    with tempfile.TemporaryFile() as output:
        workers, loader = _start(num_workers, model_directory, allow_remote_code, output.fileno())
        with loader:  # its workers die with it
            try:
                yield from _in_order(tasks, workers, lambda: _raise_for_exit(loader.wait(EXIT_SECONDS), output.fileno()))
            finally:
                for worker in workers:
                    worker.close()
            loader.wait(EXIT_SECONDS)


def _in_order(
    tasks: Iterator[PartTask], workers: Sequence[_Worker], died: Callable[[], None]
) -> Generator[tuple[PartTask, PartResult]]:
    """died: called when a worker has ended; raises unless a template's time limit ended it."""
    busy, given, done = dict[_Worker, int](), dict[int, PartTask](), dict[int, PartResult]()
    try:
        yield from _distribute(tasks, workers, busy, given, done)
    except (EOFError, ConnectionError):
        died()
        # The worker that has been on its record longest is the culprit; the others died with it.
        culprit = min(busy, key=lambda one: (one.note.read()[0] == 0, one.note.read()[1]))
        number = busy[culprit]
        done[number] = _endless(given[number], culprit.note.read()[0])
        given[number] = replace(given[number], result=None)
        yield from _without_template(given, done, tasks)


def _distribute(
    tasks: Iterator[PartTask],
    workers: Sequence[_Worker],
    busy: dict[_Worker, int],
    given: dict[int, PartTask],
    done: dict[int, PartResult],
) -> Generator[tuple[PartTask, PartResult]]:
    """Distribute tasks and yield their results.

    busy: worker -> number of its task. given: tasks that were sent and not yielded. done: results that were not yielded.
    """
    idle = list(workers)
    num_given = num_yielded = 0
    while True:
        while idle and num_given < num_yielded + AHEAD * len(workers):
            task = next(tasks, None)
            if task is None:
                break
            worker = idle.pop()
            busy[worker], given[num_given] = num_given, task
            num_given += 1
            worker.give(task)
        if num_yielded in done:
            yield given.pop(num_yielded), done.pop(num_yielded)
            num_yielded += 1
            continue
        if not busy:
            return
        wait([worker.output.descriptor for worker in busy], min(worker.seconds_left for worker in busy))
        for worker in list(busy):
            result = worker.result()
            if result is not None:
                done[busy.pop(worker)] = result
                idle.append(worker)


def _start(num_workers: int, model_directory: Path, allow_remote_code: bool, output: int) -> tuple[list[_Worker], Child]:
    """Start the workers; returns them and the process that forks them, whose output goes to the descriptor `output`."""
    notes = [new_note() for _ in range(num_workers)]
    pairs = [socketpair() for _ in notes]
    theirs = [(pair[1].fileno(), note.descriptor) for pair, note in zip(pairs, notes, strict=True)]
    settings = {
        "parent": os.getpid(),
        "model_directory": str(model_directory),
        "allow_remote_code": allow_remote_code,
        "descriptors": theirs,
    }
    # One thread each: there are as many processes as CPUs, and no thread may exist when the first process forks.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "finetune_trainer.data.worker", json.dumps(settings)]
    pass_fds = [descriptor for both in theirs for descriptor in both]
    loader = start(command, environment, stdout=output, stderr=output, pass_fds=pass_fds)
    for _, their in pairs:
        their.close()
    return [_Worker(our, note) for (our, _), note in zip(pairs, notes, strict=True)], loader


def _endless(task: PartTask, line: int) -> PartResult:
    error = endless_template_error(f"takes more than {END_SECONDS:g} s of CPU time")
    result = PartResult()
    result.found_endless(RecordProblem(line, error.key, "", error.reason, error.fix, file=task.part.path))
    return result


def _without_template(
    given: Mapping[int, PartTask], done: Mapping[int, PartResult], tasks: Iterator[PartTask]
) -> Generator[tuple[PartTask, PartResult]]:
    """The remaining results when the processes have ended: the other tasks are only checked, in this process."""
    for number, task in given.items():
        if number in done:
            yield task, done[number]
        else:
            yield from in_this_process(iter([replace(task, result=None)]), None)
    yield from in_this_process((replace(task, result=None) for task in tasks), None)


def _raise_for_exit(status: int | None, output: int) -> None:
    """Raise WorkerError for the end of a process, unless a chat template's time limit ended it.

    status: None if the process has closed its connection and not ended. output: file of its output.
    """
    if status is None:
        raise WorkerError("a process that prepares data closed its connection and did not end")
    if status in (-ENDED_BY, 128 + ENDED_BY):
        return
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise WorkerKilledError(
            "a process that prepares data was killed (SIGKILL), most likely because memory ran out",
            "raise the memory of the profile's resources.preflight",
        )
    os.lseek(output, 0, os.SEEK_SET)
    last_output = os.read(output, 1 << 20).decode(errors="replace").strip()[-LAST_OUTPUT:]
    raise WorkerError(f"a process that prepares data ended with status {status}: {last_output}")
