"""A child process that is not trusted: it has a deadline, and its output is bounded and never unpickled.

A user's file may have taken control of the child that works on it. So the parent accepts only a bounded amount of output,
validates it, and always waits with a deadline, whatever the child closes or leaves open.

There are two ways to start a child. `start` runs a program, from any process. `fork` takes a hundredth of a second, and the child
has all imports of its parent. Only a process with a single thread may call it: a lock that another thread holds at that moment,
even one inside the C library, stays locked in the child forever. For a child that sends several messages (data/workers.py), the
parent uses only `ChildOutput` and `Child.wait`.
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
"""Time that a child may take to end after it has closed its output. Freeing a lot of memory takes a moment."""
_READ_BYTES = 1 << 16
_NO_END = float("inf")

Form = TypeVar("Form")


class TooMuchOutputError(Exception):
    """A child wrote more output than is allowed."""


class ThreadsAtForkError(RuntimeError):
    """A process with several threads was about to be forked."""


class Exceeded(StrEnum):
    """The bound that a child exceeded, so that its parent killed it."""

    TIME = "did not end in time"
    OUTPUT = "wrote more than it may"
    ENDING = "closed its output and did not end"


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended."""

    code: int
    """Exit status of the child; negative: the signal that killed it."""
    answer: bytes = b""
    """Output of the child; incomplete unless `has_answered`."""
    exceeded: Exceeded | None = None
    """The bound that was exceeded, if the parent killed the child."""
    seconds: float = 0.0
    """Time from the child's start to its end."""

    @property
    def has_answered(self) -> bool:
        """Whether the child exited by itself without an error, so `answer` is complete."""
        return self.exceeded is None and self.code == 0


class ChildOutput:
    """Output of another process, read from a descriptor. Whoever opened the descriptor must close it."""

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        """max_bytes: maximum number of bytes that may be read and not yet taken."""
        os.set_blocking(descriptor, False)
        self.descriptor, self.has_ended = descriptor, False
        self._max_bytes, self._buffer = max_bytes, bytearray()

    def read(self) -> None:
        """Read what has been written, without waiting. Raises TooMuchOutputError."""
        while not self.has_ended:
            try:
                block = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                block = b""
            self.has_ended = not block
            self._buffer += block
            if len(self._buffer) > self._max_bytes:
                raise TooMuchOutputError(f"more than {self._max_bytes} bytes")

    def take(self) -> bytes:
        """Return everything that was read and has not been taken yet."""
        content = bytes(self._buffer)
        self._buffer.clear()
        return content

    def take_line(self) -> bytes | None:
        """Return the next line without its end, or None if no whole line has been read."""
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


class Child:
    """A process that this one started. Its `__exit__`, which may be called twice, kills the process if it is still running."""

    def __init__(self, pid: int, reap: Callable[[], int], output: ChildOutput | None = None) -> None:
        """reap: waits for the process and returns its exit status. output: is closed by `__exit__`; None: not read here."""
        self.pid, self.output = pid, output
        self.code: int | None = None
        """Exit status; None until the end of the process is noticed."""
        self._reap, self._descriptor = reap, os.pidfd_open(pid)
        self._started, self._output_ended, self._is_closed = time.monotonic(), _NO_END, False

    def descriptors(self) -> list[int]:
        """Return the descriptors to wait on. One of them becomes ready when there is something for `look` to handle."""
        writes = self.output is not None and not self.output.has_ended
        return [self._descriptor, *([self.output.descriptor] if self.output is not None and writes else [])]

    def wait(self, seconds: float) -> int | None:
        """Wait for the process to end. Returns its exit status, or None if it has not ended within this time."""
        if self.code is None and wait([self._descriptor], max(seconds, 0.0)):
            self.code = self._reap()
        return self.code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.code is None:
            with suppress(ProcessLookupError):  # its end was not noticed yet
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> int:
        """Kill the process, unless it has ended; returns the exit status."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = self._reap()
        return self.code

    def look(self, deadline: float) -> ChildEnd | None:
        """Kill the child if it exceeds a bound; return how it ended, or None while it runs. deadline: on the monotonic clock."""
        has_ended = self.wait(0) is not None  # checked before the output is read, so that no output is missed
        try:
            if self.output is not None:
                self.output.read()
        except TooMuchOutputError:
            return self._end(Exceeded.OUTPUT)
        if has_ended:
            return self._end(None)
        now = time.monotonic()
        if self.output is not None and self.output.has_ended:
            self._output_ended = min(self._output_ended, now)
        if now > deadline:
            return self._end(Exceeded.TIME)
        return self._end(Exceeded.ENDING) if now > self._output_ended + ENDING_SECONDS else None

    def seconds_left(self, deadline: float) -> float:
        """Time after which `look` must be called again even if the child does nothing."""
        return max(0.0, min(deadline, self._output_ended + ENDING_SECONDS) - time.monotonic())

    def _end(self, exceeded: Exceeded | None) -> ChildEnd:
        code = self.kill()
        answer = b"" if self.output is None else self.output.take()
        return ChildEnd(code, answer, exceeded, time.monotonic() - self._started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        if not self._is_closed:
            self._is_closed = True
            os.close(self._descriptor)
            if self.output is not None:
                os.close(self.output.descriptor)


def require_single_thread(pid: int) -> None:
    """Raise ThreadsAtForkError if the process has any thread besides its main thread, such as one of a native library."""
    others = [name for thread, name in sorted(threads(pid).items()) if thread != pid]
    if others:
        raise ThreadsAtForkError(f"process {pid} cannot be forked, because it has more than one thread: {', '.join(others)}")


def threads(pid: int) -> dict[int, str]:
    """Return the ids and names of a process's threads, as the kernel lists them."""
    names = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread ended meanwhile
            names[int(task.name)] = (task / "comm").read_text().strip() or "(no name)"
    return names


def fork(work: Callable[[], object], output: ChildOutput | None = None) -> Child:
    """Fork a child that runs `work` and no other code of this process, and dies with it. output: where `work` writes.

    Exit status 0: `work` returned; 1: it raised, and the traceback is on standard error. Raises ThreadsAtForkError if this
    process has more than one thread.
    """
    require_single_thread(os.getpid())
    # If buffered output were not flushed here, both processes would write it.
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
    except BaseException:  # noqa: BLE001 - no code of the parent may continue in the child
        traceback.print_exc()
    finally:
        # The parent's cleanup must not run a second time, and threads of libraries must not delay the end.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def fork_answering(work: Callable[[], bytes], max_answer_bytes: int) -> Child:
    """Fork a child as `fork` does; its answer is what `work` returns."""
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
    """Start a program, which must call `die_with` itself. given: its standard input. output: what it writes.

    Libraries start no threads in the program, so it may fork.
    """
    environment = {**NO_THREADS, **environment}
    # A file is used instead of a pipe, so that a child that does not read cannot block its parent.
    with os.fdopen(os.memfd_create("given"), "w+b") as file:
        file.write(given)
        file.seek(0)
        process = subprocess.Popen(command, stdin=file, stdout=stdout, stderr=stderr, env=environment, pass_fds=pass_fds)
    return Child(process.pid, process.wait, output)


def start_answering(command: Sequence[str], environment: Mapping[str, str], given: bytes, max_answer_bytes: int) -> Child:
    """Start a program as `start` does; its answer is its standard output."""
    reading, writing = os.pipe()
    output = ChildOutput(reading, max_answer_bytes)
    child = start(command, environment, given=given, stdout=writing, output=output)
    os.close(writing)
    return child


def wait_for_ends(
    children: Sequence[Child], deadline: float, look_seconds: float = _NO_END
) -> Iterator[tuple[Child, ChildEnd] | None]:
    """Yield each child that exits or is killed because it exceeds a bound. Yields None at least every `look_seconds`, so that the
    caller can check other bounds.
    """
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
    """Wait at most `seconds` for a child to end. If it has not ended by then, or if an error occurs, the child is killed."""
    with child:
        return next(end[1] for end in wait_for_ends([child], time.monotonic() + seconds) if end is not None)


def encode_answer(value: Any) -> bytes:
    """Encode a value as one line of JSON without a newline. Text that is not valid Unicode, as in file names, is kept."""
    return json.dumps(value).encode()


def parse_answer(content: bytes, form: TypeAdapter[Form]) -> Form:
    """Decode JSON into a value of the type `form`. Raises ValueError for anything else."""
    try:
        return form.validate_python(json.loads(content))
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def _write(descriptor: int, content: bytes) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
