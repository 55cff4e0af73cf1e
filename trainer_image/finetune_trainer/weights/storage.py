"""Reads and writes all bytes of a merge's files. An OSError is re-raised as a StorageError that names the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune_trainer.errors import NO_SPACE, REFUSED_WRITES
from finetune_trainer.files import sync_file
from finetune_trainer.weights.errors import NoSpaceError, StorageError


@contextmanager
def translate_os_errors(path: Path, what: str) -> Iterator[None]:
    """Turn an OSError into a StorageError, which says that the file could not be `what` (read, written or made durable)."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in NO_SPACE:
            raise NoSpaceError(
                f"{path} could not be {what} ({reason}). The merged model needs as much space as the base model in the merge's "
                "dtype; enlarge the workspace. Finished parts are kept; the next try continues from them."
            ) from error
        is_refused = error.errno in REFUSED_WRITES
        advice = "Change its owner, mode or mount options" if is_refused else "Check the disk and its mount"
        raise StorageError(
            f"{path} could not be {what} ({reason}). {advice}; the next try continues from what is on disk."
        ) from error


def read_some(descriptor: int, target: memoryview, position: int) -> int:
    """Fill `target` with bytes from `position` on. Return their number: below `len(target)` only at the end of the file."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], position + done)
        if count == 0:
            break
        done += count
    return done


def write_all(descriptor: int, data: memoryview, position: int) -> None:
    """Write all of `data` at `position`."""
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], position + written)


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names in a directory, durable."""
    with translate_os_errors(path, "made durable"):
        sync_file(path)
