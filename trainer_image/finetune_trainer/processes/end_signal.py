"""A signal that processes wait for, and that can be sent even if some of the waiting processes were killed.

`multiprocessing.Event.set` waits until every waiting process has woken up, so it hangs if one was killed. Here the processes wait
for end of file on a pipe, which `set` closes without waiting. They also continue if the process that should call `set` exits.
"""

from __future__ import annotations

from multiprocessing.connection import Connection, Pipe


class EndSignal:
    """A signal that is sent once. Processes that receive this object as an argument can only call `wait`."""

    def __init__(self) -> None:
        reader, writer = Pipe(duplex=False)
        self._reader: Connection = reader
        self._writer: Connection | None = writer

    def set(self) -> None:
        """Let all waiting processes continue."""
        if self._writer is not None:
            self._writer.close()

    def wait(self) -> None:
        """Wait until the signal is sent, or the process that should send it has exited."""
        self._reader.poll(None)

    def __getstate__(self) -> Connection:
        return self._reader

    def __setstate__(self, reader: Connection) -> None:
        self._reader, self._writer = reader, None
