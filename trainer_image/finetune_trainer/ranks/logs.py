"""Reads each local rank's output from a pipe, keeps it in size-capped files on the workspace, and prints it, each line after the
rank's name.
"""

from __future__ import annotations

import os
import select
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType

from finetune_trainer.files import append_to_own

CAP_BYTES = 8 << 20
"""A log file that reaches this size is renamed to `<name>.previous`, so that at most twice this size is kept."""


class CappedFile:
    """A log file that keeps its newest bytes, at most twice `cap_bytes`."""

    def __init__(self, path: Path, cap_bytes: int = CAP_BYTES) -> None:
        self._path, self._cap_bytes = path, cap_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(append_to_own(path), "ab", buffering=0)

    def write(self, content: bytes) -> None:
        """Append `content`. Raises OSError."""
        if self._file.tell() and self._file.tell() + len(content) > self._cap_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(f"{self._path.name}.previous"))
            self._file = os.fdopen(append_to_own(self._path), "ab", buffering=0)
        self._file.write(content)

    def close(self) -> None:
        self._file.close()


def rank_log_name(rank: int) -> str:
    """File name of a rank's log."""
    return f"rank-{rank:05d}.log"


class RankLogs:
    """Named pipes for the local ranks' output. A rank that opens its pipe blocks until a thread here opens it for reading."""

    def __init__(self, directory: Path, ranks: range) -> None:
        """ranks: the global rank of each local rank."""
        self._logs, self._ranks = directory, ranks
        self._temporary = tempfile.TemporaryDirectory(prefix="rank-output-")
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        for local_rank in range(len(ranks)):
            os.mkfifo(self.pipes / str(local_rank))

    @property
    def pipes(self) -> Path:
        """Directory that holds a pipe for each local rank, named after the local rank."""
        return Path(self._temporary.name)

    def __enter__(self) -> RankLogs:
        for local_rank, rank in enumerate(self._ranks):
            # Also open it for writing, so that the pipe stays open when the rank closes its end.
            descriptor = os.open(self.pipes / str(local_rank), os.O_RDWR | os.O_NONBLOCK)
            thread = threading.Thread(target=self._copy, args=(descriptor, rank), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._temporary.cleanup()

    def _copy(self, descriptor: int, rank: int) -> None:
        log: CappedFile | None = None
        rest = b""
        try:
            while True:
                is_closing = self._closing.is_set()
                ready, _, _ = select.select([descriptor], [], [], 0 if is_closing else 0.2)
                if not ready:
                    if is_closing:
                        break
                    continue
                content = os.read(descriptor, 1 << 16)
                try:
                    log = log or CappedFile(self._logs / rank_log_name(rank))
                    log.write(content)
                except OSError:
                    # If the claim is full, keep reading: ranks would block on a pipe that is not read.
                    pass
                *lines, rest = (rest + content).split(b"\n")
                show(f"rank {rank}", lines)
            show(f"rank {rank}", [rest] if rest else [])
        finally:
            os.close(descriptor)
            if log is not None:
                log.close()


def show(source: str, lines: list[bytes]) -> None:
    """Print lines, each prefixed with `source`. Lines stay whole even if other threads print."""
    text = "".join(f"[{source}] {line.decode(errors='replace')}\n" for line in lines)
    sys.stdout.write(text)
    sys.stdout.flush()
