"""Parts of files -> their results, in order, worked on by several processes (worker.py) or by this one.

Processes and not threads, because a chat template and the reading of JSON hold Python's lock.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socketpair
from typing import cast

from finetune_job.failures import FailureClass
from finetune_trainer.data.chat import endless
from finetune_trainer.data.parts import PartResult, PartTask, work_on
from finetune_trainer.data.records import RecordProblem
from finetune_trainer.data.render_limit import END_SECONDS, ENDED_BY, RecordNote, new_note
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
    notes = [new_note() for _ in range(num_workers)]
    with tempfile.TemporaryFile() as output:
        connections, process = _start(notes, model_directory, allow_remote_code, output.fileno())

        def died() -> None:
            _explain(process.wait(EXIT_SECONDS), output.fileno())

        try:
            yield from _in_order(tasks, dict(zip(connections, notes, strict=True)), died)
        finally:
            _close(connections, notes)
            if sys.exc_info()[0] is not None:
                process.kill()  # and with it the workers
            process.wait(EXIT_SECONDS)


def in_fork(tasks: Iterator[PartTask], tokenizer: Tokenizer) -> Generator[tuple[PartTask, PartResult]]:
    """One after the other, in a process forked from this one: starts at once, and may be ended where a template does not end.

    Raises as `in_workers` does.
    """
    from finetune_trainer.data.worker import serve

    parent, note, (ours, theirs) = os.getpid(), new_note(), socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        serve(Connection(theirs.detach()), tokenizer, parent, note)
    theirs.close()
    connection = Connection(ours.detach())
    ended: list[int] = []

    def wait_for_it() -> int:
        if not ended:
            ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return ended[0]

    try:
        yield from _in_order(tasks, {connection: note}, lambda: _explain(wait_for_it(), None))
    finally:
        _close([connection], [note])
        if sys.exc_info()[0] is not None and not ended:
            os.kill(child, signal.SIGKILL)
        wait_for_it()


def _close(connections: list[Connection], notes: list[RecordNote]) -> None:
    for connection in connections:
        connection.close()
    for note in notes:
        os.close(note.descriptor)


def _in_order(
    tasks: Iterator[PartTask], notes: Mapping[Connection, RecordNote], died: Callable[[], None]
) -> Generator[tuple[PartTask, PartResult]]:
    """`notes`: of the process at each connection. `died` raises unless the process was ended because of a template."""
    busy, given, done = dict[Connection, int](), dict[int, PartTask](), dict[int, PartResult]()
    try:
        yield from _shared_out(tasks, list(notes), busy, given, done)
    except (EOFError, ConnectionError):
        died()
        # Those that were innocent died with it; it was at its record for the longest time.
        endless_one = min(busy, key=lambda one: (notes[one].read()[0] == 0, notes[one].read()[1]))
        number = busy[endless_one]
        done[number] = _endless(given[number], notes[endless_one].read()[0])
        given[number] = replace(given[number], result=None)
        yield from _without_template(given, done, tasks)


def _shared_out(
    tasks: Iterator[PartTask],
    connections: list[Connection],
    busy: dict[Connection, int],
    given: dict[int, PartTask],
    done: dict[int, PartResult],
) -> Generator[tuple[PartTask, PartResult]]:
    """Keeps what each connection works on, and by number what was given and not yielded, and what of that is done."""
    idle = list(connections)
    num_given = num_yielded = 0
    while True:
        while idle and num_given < num_yielded + AHEAD * len(connections):
            task = next(tasks, None)
            if task is None:
                break
            connection = idle.pop()
            busy[connection], given[num_given] = num_given, task
            num_given += 1
            connection.send(task)
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
    notes: list[RecordNote], model_directory: Path, allow_remote_code: bool, output: int
) -> tuple[list[Connection], subprocess.Popen[bytes]]:
    pairs = [socketpair() for _ in notes]
    theirs = [(pair[1].fileno(), note.descriptor) for pair, note in zip(pairs, notes, strict=True)]
    settings = {
        "parent": os.getpid(),
        "model_directory": str(model_directory),
        "allow_remote_code": allow_remote_code,
        "descriptors": theirs,
    }
    # One thread each: there are as many processes as CPUs, and no thread may exist when the first of them forks.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "finetune_trainer.data.worker", json.dumps(settings)]
    process = subprocess.Popen(
        command,
        pass_fds=[descriptor for both in theirs for descriptor in both],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )
    connections = [Connection(pair[0].detach()) for pair in pairs]
    for pair in pairs:
        pair[1].close()
    return connections, process


def _endless(task: PartTask, line: int) -> PartResult:
    error = endless(f"takes more than {END_SECONDS:g} s of CPU time")
    result = PartResult()
    result.found_endless(RecordProblem(line, error.key, "", error.reason, error.fix, file=task.part.path))
    return result


def _without_template(
    given: Mapping[int, PartTask], done: Mapping[int, PartResult], tasks: Iterator[PartTask]
) -> Generator[tuple[PartTask, PartResult]]:
    """What is left when the processes have gone: the rest is only checked, in this one."""
    for number, task in given.items():
        if number in done:
            yield task, done[number]
        else:
            yield from in_this_process(iter([replace(task, result=None)]), None)
    yield from in_this_process((replace(task, result=None) for task in tasks), None)


def _explain(status: int, output: int | None) -> None:
    """Raises WorkerError for the end of a process, unless it was a chat template's. `output`: file of what it said."""
    if status in (-ENDED_BY, 128 + ENDED_BY):
        return
    if status in (-9, 128 + 9):
        raise WorkerKilledError(
            "a process that prepares data was killed (SIGKILL), most likely because memory ran out",
            "raise the memory of the profile's resources.preflight",
        )
    said = "its log says why"
    if output is not None:
        os.lseek(output, 0, os.SEEK_SET)
        said = os.read(output, 1 << 20).decode(errors="replace").strip()[-LAST_OUTPUT:]
    raise WorkerError(f"a process that prepares data ended with status {status}: {said}")
