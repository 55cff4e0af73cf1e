"""Which attempt a container runs: that of its arguments, or the next one if the kubelet has started the container again.

The volumes of a pod outlive its containers, so a file says which attempt was begun last. A container that was started again waits
until the pod's label names its attempt, which the kubelet shows in a file: by then the operator has put it on record.
"""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

from finetune_trainer.files import write_durably

MARKER = Path("/tmp/attempt-of-container")  # noqa: S108 - the scratch volume of the pod, whatever TMPDIR an image sets
"""The attempt that the latest container of this pod has taken."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a volume of the pod's own
LONGEST_WAIT_SECONDS = 300.0
"""For the operator: after it the pod fails, and gives its devices back."""
_POLL_SECONDS = 0.1


def take_attempt(first: int, marker: Path = MARKER, shared_memory: Path = SHARED_MEMORY) -> int:
    """The attempt of this container. first: that of its arguments.

    What the container before left in shared memory goes: its processes are gone, and it would count as memory of this one.
    Raises OSError, and ValueError if the marker is not whole: nobody knows then what has run.
    """
    try:
        attempt = int(marker.read_text()) + 1
    except FileNotFoundError:
        attempt = first
    write_durably(marker, str(attempt).encode())
    if attempt != first:
        _empty(shared_memory)
    return attempt


def wait_until_told(path: Path, attempt: int, stopped: threading.Event, seconds: float = LONGEST_WAIT_SECONDS) -> bool:
    """Wait until the file names this attempt. False: a stop was asked for, or nobody has named it in so many seconds."""
    deadline = time.monotonic() + seconds
    while not _names(path, attempt):
        if stopped.wait(_POLL_SECONDS) or time.monotonic() >= deadline:
            return False
    return True


def _names(path: Path, attempt: int) -> bool:
    try:
        return path.read_text().strip() == str(attempt)
    except (OSError, UnicodeDecodeError):
        # The kubelet replaces the directory that it is in.
        return False


def _empty(directory: Path) -> None:
    """As far as it goes: another container of the pod may have files there."""
    for entry in directory.iterdir() if directory.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with suppress(OSError):
                entry.unlink()
