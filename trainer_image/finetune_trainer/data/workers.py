"""Parts of files -> their results, in order, worked on by several processes (worker.py) or by this one.

Processes and not threads, because a chat template and the reading of JSON hold Python's lock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socketpair
from typing import cast

from finetune_job.failures import FailureClass
from finetune_trainer.data.parts import PartResult, PartTask, work_on
from finetune_trainer.data.tokenize import Tokenizer
from finetune_trainer.errors import TrainerError

MAX_WORKERS = 8
"""A worker holds some tens of MB of its own."""
AHEAD = 4
"""Results per worker that may wait for an earlier one, on disk."""
EXIT_SECONDS = 60.0
LAST_OUTPUT = 2000
"""Characters of a worker's output that an error shows."""


class WorkerError(TrainerError):
    """A process that prepares data ended before its work did."""


class WorkerKilledError(WorkerError):
    """By SIGKILL, which is what the kernel does where memory runs out."""

    failure = FailureClass.HOST_OUT_OF_MEMORY


def in_this_process(tasks: Iterator[PartTask], tokenizer: Tokenizer | None) -> Generator[tuple[PartTask, PartResult]]:
    """One after the other."""
    for task in tasks:
        yield task, work_on(task, tokenizer)


def in_workers(
    tasks: Iterator[PartTask], num_workers: int, model_directory: Path, allow_remote_code: bool
) -> Generator[tuple[PartTask, PartResult]]:
    """Tasks are taken as workers become free and at most AHEAD * num_workers before the oldest that is not done.

    Raises what a worker met (OSError where it could not write), WorkerError where one died.
    """
    with tempfile.TemporaryFile() as output:
        connections, process = _start(num_workers, model_directory, allow_remote_code, output.fileno())
        try:
            yield from _in_order(tasks, connections)
        except (EOFError, ConnectionError) as error:
            raise _died(process, output.fileno()) from error
        finally:
            for connection in connections:
                connection.close()
            if sys.exc_info()[0] is not None:
                process.kill()  # and with it the workers
            process.wait(EXIT_SECONDS)


def _in_order(tasks: Iterator[PartTask], connections: list[Connection]) -> Generator[tuple[PartTask, PartResult]]:
    idle, busy = list(connections), dict[Connection, int]()
    given, done = dict[int, PartTask](), dict[int, PartResult]()
    num_given = num_yielded = 0
    while True:
        while idle and num_given < num_yielded + AHEAD * len(connections):
            task = next(tasks, None)
            if task is None:
                break
            connection = idle.pop()
            connection.send(task)
            busy[connection] = num_given
            given[num_given] = task
            num_given += 1
        if num_yielded in done:
            yield given.pop(num_yielded), done.pop(num_yielded)
            num_yielded += 1
            continue
        if not busy:
            return
        for ready in wait(list(busy)):
            connection = cast("Connection", ready)
            result, error, trace = connection.recv()
            if error is not None:
                raise error
            if result is None:
                raise WorkerError(f"a process that prepares data failed:\n{trace}")
            done[busy.pop(connection)] = result
            idle.append(connection)


def _start(
    num_workers: int, model_directory: Path, allow_remote_code: bool, output: int
) -> tuple[list[Connection], subprocess.Popen[bytes]]:
    pairs = [socketpair() for _ in range(num_workers)]
    theirs = [pair[1].fileno() for pair in pairs]
    settings = {
        "parent": os.getpid(),
        "model_directory": str(model_directory),
        "allow_remote_code": allow_remote_code,
        "descriptors": theirs,
    }
    # One thread each: there are as many processes as CPUs, and no thread may exist when the first of them forks.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "finetune_trainer.data.worker", json.dumps(settings)]
    process = subprocess.Popen(command, pass_fds=theirs, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    connections = [Connection(pair[0].detach()) for pair in pairs]
    for pair in pairs:
        pair[1].close()
    return connections, process


def _died(process: subprocess.Popen[bytes], output: int) -> WorkerError:
    status = process.wait(EXIT_SECONDS)
    if status in (-9, 128 + 9):
        return WorkerKilledError(
            "a process that prepares data was killed (SIGKILL), most likely because memory ran out",
            "raise the memory of the profile's resources.preflight",
        )
    os.lseek(output, 0, os.SEEK_SET)
    said = os.read(output, 1 << 20).decode(errors="replace").strip()[-LAST_OUTPUT:]
    return WorkerError(f"a process that prepares data ended with status {status}: {said}")
