"""Signs that a rank leaves for its node's supervisor before it imports libraries or joins: its process id and a stacks file.

Both are in the directory of the rank's output pipe, which is on the node, so they do not depend on the workspace.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_STACKS_BYTES = 1 << 16


def leave_start_signs(directory: Path, local_rank: int) -> None:
    """Record that this rank has started. From then on, SIGUSR1 writes the stacks of all its threads, even if no thread can run
    Python.

    Raises OSError.
    """
    stacks = os.open(_stacks(directory, local_rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _started(directory, local_rank).write_text(str(os.getpid()))


def read_started(directory: Path, ranks: range) -> dict[int, int]:
    """Return global rank -> process id, for those of a node's ranks that have started. ranks: the node's global ranks."""
    return dict(_read(directory, ranks))


def _read(directory: Path, ranks: range) -> Iterable[tuple[int, int]]:
    for local_rank, rank in enumerate(ranks):
        with suppress(OSError, ValueError):
            yield rank, int(_started(directory, local_rank).read_text())


def start_stacks(directory: Path, local_rank: int) -> str:
    """Return the stacks that this rank wrote; empty if it wrote none."""
    try:
        return _stacks(directory, local_rank).read_bytes()[-_STACKS_BYTES:].decode(errors="replace")
    except OSError:
        return ""


def remove_start_signs(directory: Path, num_ranks: int) -> None:
    """Remove the signs of ranks that have ended, before new ranks start in their place."""
    for local_rank in range(num_ranks):
        for path in (_started(directory, local_rank), _stacks(directory, local_rank)):
            path.unlink(missing_ok=True)


def _started(directory: Path, local_rank: int) -> Path:
    return directory / f"started-{local_rank}"


def _stacks(directory: Path, local_rank: int) -> Path:
    return directory / f"stacks-{local_rank}"
