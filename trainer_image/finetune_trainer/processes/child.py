"""A child process that is read without trust: it has a deadline, may write so much and no more, and is never unpickled.

A child that works on a user's file may have been taken over by it. So its parent keeps no more of what it writes than a bound,
takes it for text that has to be validated, and waits for nothing without a deadline, whatever the child closes or leaves open.
There are two ways to start one. `start` runs a program, from any process. `fork` takes a hundredth of a second and has all
imported that its parent has, and is only for a process with a single thread: a lock that another thread holds at that moment, of
the C library or of anything else, stays locked in the child forever. If a child has several messages (data/workers.py),
`ChildOutput` and `Child.wait` are used alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter

from finetune_trainer.processes.start import NO_THREADS, die_with

ENDING_SECONDS = 60.0
"""What a child may take to end after it has closed its output. It ends at once, but the memory of many of them has to be
freed."""
_READ_BYTES = 1 << 16
_NO_END = float("inf")

Form = TypeVar("Form")


class TooMuchOutputError(Exception):
    """More was written than is allowed."""


class ThreadsAtForkError(RuntimeError):
    """A process with several threads was to be forked."""


class Exceeded(StrEnum):
    """A bound for which the parent killed a child."""

    TIME = "did not end in time"
    OUTPUT = "wrote more than it may"
    ENDING = "closed its output and did not end"


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended."""

    code: int
    """Its exit status; negative: the signal."""
    answer: bytes = b""
    """What it wrote; incomplete unless `has_answered`."""
    exceeded: Exceeded | None = None
    """Why the parent killed it, if it did."""
    seconds: float = 0.0
    """From its start to its end."""

    @property
    def has_answered(self) -> bool:
        """Whether it has ended by itself and without an error, so that `answer` is all that it had to say."""
        return self.exceeded is None and self.code == 0


class ChildOutput:
    """What another process writes to a descriptor, taken as it comes. The one who opened the descriptor closes it."""

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        """max_bytes: that may wait here before somebody takes them."""
        os.set_blocking(descriptor, False)
        self.descriptor, self.has_ended = descriptor, False
        self._max_bytes, self._held = max_bytes, bytearray()

    def read(self) -> None:
        """Take what has been written, without waiting. Raises TooMuchOutputError."""
        while not self.has_ended:
            try:
                block = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                block = b""
            self.has_ended = not block
            self._held += block
            if len(self._held) > self._max_bytes:
                raise TooMuchOutputError(f"more than {self._max_bytes} bytes")

    def take(self) -> bytes:
        """Everything that was read and not taken yet."""
        taken = bytes(self._held)
        self._held.clear()
        return taken

    def take_line(self) -> bytes | None:
        """The next line, without its end; None: no whole line has been read."""
        end = self._held.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        return line


class Child:
    """A process that this one has started. As a context it is killed at the end, should it still be there."""

    def __init__(self, pid: int, reap: Callable[[], int], output: ChildOutput | None = None) -> None:
        """reap: waits for its end and returns its exit status. output: what it writes, closed with this; None: not read here."""
        self.pid, self.output = pid, output
        self.code: int | None = None
        """Its exit status; None: it has not been seen to end."""
        self._reap, self._descriptor = reap, os.pidfd_open(pid)
        self._started, self._closed = time.monotonic(), _NO_END

    def descriptors(self) -> list[int]:
        """Of which one is ready when there is something to see."""
        writes = self.output is not None and not self.output.has_ended
        return [self._descriptor, *([self.output.descriptor] if self.output is not None and writes else [])]

    def wait(self, seconds: float) -> int | None:
        """Its exit status as soon as it has ended; None: it has not within this time."""
        if self.code is None and wait([self._descriptor], max(seconds, 0.0)):
            self.code = self._reap()
        return self.code

    def join(self) -> int:
        """Its exit status, when it has ended."""
        if self.code is None:
            self.code = self._reap()
        return self.code

    def send_signal(self, number: int) -> None:
        """To the process, unless it has ended."""
        if self.code is None:
            with suppress(ProcessLookupError):  # between its end and the moment in which it is seen here
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> int:
        """End it, unless it has ended; the exit status."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = self._reap()
        return self.code

    def look(self, deadline: float) -> ChildEnd | None:
        """How it has ended, or is ended here because of a bound; None: it may continue. deadline: on the monotonic clock."""
        has_ended = self.wait(0) is not None  # before its output is read: then all of it is there
        try:
            if self.output is not None:
                self.output.read()
        except TooMuchOutputError:
            return self._end(Exceeded.OUTPUT)
        if has_ended:
            return self._end(None)
        now = time.monotonic()
        if self.output is not None and self.output.has_ended:
            self._closed = min(self._closed, now)
        if now > deadline:
            return self._end(Exceeded.TIME)
        return self._end(Exceeded.ENDING) if now > self._closed + ENDING_SECONDS else None

    def seconds_left(self, deadline: float) -> float:
        """Until `look` has something to decide, even if the child does nothing."""
        return max(0.0, min(deadline, self._closed + ENDING_SECONDS) - time.monotonic())

    def _end(self, exceeded: Exceeded | None) -> ChildEnd:
        code = self.kill()
        answer = b"" if self.output is None else self.output.take()
        return ChildEnd(code, answer, exceeded, time.monotonic() - self._started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        os.close(self._descriptor)
        if self.output is not None:
            os.close(self.output.descriptor)


def require_single_thread(pid: int) -> None:
    """Raises ThreadsAtForkError if a process that is forked has more threads than its main one, native libraries' included."""
    others = [name for thread, name in sorted(threads(pid).items()) if thread != pid]
    if others:
        raise ThreadsAtForkError(f"process {pid} cannot be forked, because it has more threads than one: {', '.join(others)}")


def threads(pid: int) -> dict[int, str]:
    """The kernel's ids and names of the threads of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread ended meanwhile
            found[int(task.name)] = (task / "comm").read_text().strip() or "(no name)"
    return found


def fork(work: Callable[[], object], output: ChildOutput | None = None) -> Child:
    """A copy of this process that does `work`, dies with this one and runs nothing else of it. output: to which `work` writes.

    Exit status 0: the work is done; 1: it raised, and the traceback is on standard error. Raises ThreadsAtForkError if this
    process has more threads than the one that calls.
    """
    require_single_thread(os.getpid())
    # What is held back would be written twice.
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Child(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output)
    status = 1
    try:
        die_with(parent)
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - nothing of the parent's may continue in the child
        traceback.print_exc()
    finally:
        # Nothing of the parent's may run a second time, and threads of libraries must not hold up the end.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def fork_answering(work: Callable[[], bytes], max_answer_bytes: int) -> Child:
    """As `fork`, for a child whose answer is what `work` returns."""
    reading, writing = os.pipe()
    child = fork(lambda: _write(writing, work()), ChildOutput(reading, max_answer_bytes))
    os.close(writing)
    return child


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    given: bytes = b"",
    stdout: int,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
    output: ChildOutput | None = None,
) -> Child:
    """A program that reads `given` from its standard input. It has to call `die_with` itself. output: of what it writes.

    It may fork: libraries start no threads in it.
    """
    environment = {**NO_THREADS, **environment}
    # A file and not a pipe: a child that does not read must not hold up its parent.
    with os.fdopen(os.memfd_create("given"), "w+b") as file:
        file.write(given)
        file.seek(0)
        process = subprocess.Popen(command, stdin=file, stdout=stdout, stderr=stderr, env=environment, pass_fds=pass_fds)
    return Child(process.pid, process.wait, output)


def start_answering(
    command: Sequence[str],
    environment: Mapping[str, str],
    given: bytes,
    max_answer_bytes: int,
    pass_fds: Sequence[int] = (),
) -> Child:
    """As `start`, for a program that answers on its standard output."""
    reading, writing = os.pipe()
    output = ChildOutput(reading, max_answer_bytes)
    child = start(command, environment, given=given, stdout=writing, pass_fds=pass_fds, output=output)
    os.close(writing)
    return child


def wait_for_ends(
    children: Sequence[Child], deadline: float, look_seconds: float = _NO_END
) -> Iterator[tuple[Child, ChildEnd] | None]:
    """Each child as it ends or is ended for a bound, and None at least every `look_seconds`: time to look at other bounds."""
    running = list(children)
    while running:
        left = min(look_seconds, *(child.seconds_left(deadline) for child in running))
        wait([descriptor for child in running for descriptor in child.descriptors()], None if left == _NO_END else left)
        for child in list(running):
            end = child.look(deadline)
            if end is not None:
                running.remove(child)
                yield child, end
        yield None


def wait_for_answer(child: Child, seconds: float) -> ChildEnd:
    """How a child ends that has this much time from now on. It is gone afterwards, whatever happens."""
    with child:
        return next(found[1] for found in wait_for_ends([child], time.monotonic() + seconds) if found is not None)


def wait_for_line(child: Child, deadline: float) -> bytes | ChildEnd:
    """The next line that a child writes, without its end; or how it has ended, with all that it wrote since the last one."""
    while (end := child.look(deadline)) is None:
        line = None if child.output is None else child.output.take_line()
        if line is not None:
            return line
        wait(child.descriptors(), child.seconds_left(deadline))
    return end


def encode_answer(value: Any) -> bytes:
    """A value that JSON knows, as a line without its end. Texts that are not valid Unicode, such as names of files, are kept."""
    return json.dumps(value).encode()


def parse_answer(content: bytes, form: TypeAdapter[Form]) -> Form:
    """The value of this form that JSON holds. Raises ValueError for anything else."""
    try:
        return form.validate_python(json.loads(content))
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def _write(descriptor: int, content: bytes) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
