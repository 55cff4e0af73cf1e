"""The cache of what is slow to make: the test cluster's executables and its node's imported images."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE_VARIABLE = "FINETUNE_TEST_CACHE"
"""Environment variable that replaces the cache's default directory."""


def cache_root() -> Path:
    """Return the cache's directory, which may not exist yet."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).absolute() if chosen else Path.home() / ".cache" / "finetune-operator"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, so that one of several test runs builds and the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
