"""A signal that processes wait for, and that can be given even if some of them were killed.

`set` of multiprocessing's event waits until every waiting process has woken up: forever, if one was killed. Here the processes
wait for the end of a pipe, which `set` closes without waiting. They also continue if the process that would give it exits.
"""

from __future__ import annotations

from multiprocessing.connection import Connection, Pipe


class EndSignal:
    """A signal that is given once. Only `wait` works in the processes to which it is sent as an argument."""

    def __init__(self) -> None:
        reader, writer = Pipe(duplex=False)
        self._reader: Connection = reader
        self._writer: Connection | None = writer

    def set(self) -> None:
        """Let all waiting processes continue."""
        if self._writer is not None:
            self._writer.close()

    def wait(self) -> None:
        """Wait until the signal is given or the process that would give it has exited."""
        self._reader.poll(None)

    def __getstate__(self) -> Connection:
        return self._reader

    def __setstate__(self, reader: Connection) -> None:
        self._reader, self._writer = reader, None
