"""Prepares parts of files in several processes (worker.py) or in this one, and yields their results in order.

Threads would not help, because chat templates and JSON parsing hold the GIL.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from socket import socket, socketpair

from finetune_job.failures import FailureClass
from finetune_trainer.data.file_parts import PartResult, PartTask, work_on
from finetune_trainer.data.messages import MAX_ANSWER_BYTES, WorkerError, read_answer, task_line
from finetune_trainer.data.tokenize import Tokenizer
from finetune_trainer.processes.child import Child, ChildOutput, TooMuchOutputError, start

MAX_WORKERS = 8
"""Maximum number of workers. Each takes some tens of MB of memory in addition to what they share."""
AHEAD = 4
"""Number of results per worker that may wait on disk for an earlier result."""
EXIT_SECONDS = 60.0
"""Time that a process may take to end after its connection has closed."""
TAKING_SECONDS = 60.0
"""Time that an idle worker may take to read its next task."""
PART_SECONDS = 1800.0
SLOWEST_BYTES_PER_SECOND = 16 << 10
"""A part may take PART_SECONDS plus the time for its bytes at this speed, a hundredth of that of an old machine."""
LAST_OUTPUT = 2000
"""Maximum number of characters of a worker's output that an error shows."""


class WorkerKilledError(WorkerError):
    """The process was killed by SIGKILL, which the kernel sends if memory runs out."""

    failure = FailureClass.HOST_OUT_OF_MEMORY


def in_this_process(tasks: Iterator[PartTask], tokenizer: Tokenizer | None) -> Generator[tuple[PartTask, PartResult]]:
    """Work on one task after another. A chat template that no exception can interrupt is never stopped here."""
    for task in tasks:
        yield task, work_on(task, tokenizer)


class _Worker:
    """A worker process at the other end of a socket, its current task, and the deadline of this task."""

    def __init__(self, connection: socket) -> None:
        # ChildOutput makes the socket non-blocking for reading; this limits how long writing may wait.
        connection.settimeout(TAKING_SECONDS)
        self.connection, self.output = connection, ChildOutput(connection.fileno(), MAX_ANSWER_BYTES)
        self._file, self._deadline = Path(), 0.0

    def give(self, task: PartTask) -> None:
        """Send a task to the worker. Raises WorkerError, ConnectionError."""
        self._file = task.part.path
        self._deadline = time.monotonic() + PART_SECONDS + task.part.num_bytes / SLOWEST_BYTES_PER_SECOND
        try:
            self.connection.sendall(task_line(task))
        except TimeoutError as error:
            raise WorkerError(f"a process that prepares data took no task within {TAKING_SECONDS:.0f} s") from error

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def result(self) -> PartResult | None:
        """Return the task's result; None if it has not arrived yet. Raises the worker's error or WorkerError, and EOFError if the
        worker ended.
        """
        try:
            self.output.read()
        except TooMuchOutputError as error:
            raise WorkerError("a process that prepares data wrote something other than a result") from error
        line = self.output.take_line()
        if line is not None:
            return read_answer(line, self._file)
        if self.output.has_ended:
            raise EOFError
        if not self.seconds_left:
            raise WorkerError(f"a process that prepares data did not finish {self._file.name}")
        return None


def in_workers(
    tasks: Iterator[PartTask], num_workers: int, model_directory: Path, allow_remote_code: bool
) -> Generator[tuple[PartTask, PartResult]]:
    """Work on the tasks in `num_workers` processes; yields the results in order.

    Tasks are taken as workers become free, but no more than AHEAD * num_workers ahead of the oldest unfinished task. Raises a
    worker's error (OSError if it could not write), or WorkerError if a worker died.
    """
    with tempfile.TemporaryFile() as output:
        workers, loader = _start(num_workers, model_directory, allow_remote_code, output.fileno())
        with loader:  # the workers die with the loader
            try:
                yield from _in_order(tasks, workers)
            except (EOFError, ConnectionError) as error:
                raise _error_of_exit(loader.wait(EXIT_SECONDS), output.fileno()) from error
            finally:
                for worker in workers:
                    worker.connection.close()
            loader.wait(EXIT_SECONDS)


def _in_order(tasks: Iterator[PartTask], workers: list[_Worker]) -> Generator[tuple[PartTask, PartResult]]:
    """Distribute tasks and yield their results. Raises the same exceptions as `_Worker`."""
    idle, busy = list(workers), dict[_Worker, int]()
    # Task number -> task that was sent but not yielded yet, and task number -> result that has arrived.
    sent, done = dict[int, PartTask](), dict[int, PartResult]()
    num_sent = num_yielded = 0
    while True:
        while idle and num_sent < num_yielded + AHEAD * len(workers):
            task = next(tasks, None)
            if task is None:
                break
            worker = idle.pop()
            busy[worker], sent[num_sent] = num_sent, task
            num_sent += 1
            worker.give(task)
        if num_yielded in done:
            yield sent.pop(num_yielded), done.pop(num_yielded)
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
    """Start the workers. Returns them and the process that forks them, whose output goes to the descriptor `output`."""
    pairs = [socketpair() for _ in range(num_workers)]
    descriptors = [their.fileno() for _, their in pairs]
    settings = {
        "parent": os.getpid(),
        "model_directory": str(model_directory),
        "allow_remote_code": allow_remote_code,
        "descriptors": descriptors,
    }
    # Each process has one thread: there are as many processes as CPUs, and no thread may exist when the first process forks.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "finetune_trainer.data.worker", json.dumps(settings)]
    loader = start(command, environment, stdout=output, stderr=output, pass_fds=descriptors)
    for _, their in pairs:
        their.close()
    return [_Worker(our) for our, _ in pairs], loader


def _error_of_exit(status: int | None, output: int) -> WorkerError:
    """The error to raise if the processes end early. status: None if they have closed a connection but are still running.

    output: descriptor of the file with their output.
    """
    if status is None:
        return WorkerError("a process that prepares data closed its connection and did not end")
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return WorkerKilledError(
            "a process that prepares data was killed (SIGKILL), most likely because memory ran out",
            "raise the memory of the profile's resources.preflight",
        )
    os.lseek(output, 0, os.SEEK_SET)
    last_output = os.read(output, 1 << 20).decode(errors="replace").strip()[-LAST_OUTPUT:]
    return WorkerError(f"a process that prepares data exited with status {status}: {last_output}")
