"""Where the test cluster keeps what is slow to make: its executables and its node's imported images."""

import os
from pathlib import Path

CACHE_VARIABLE = "FINETUNE_TEST_CACHE"
"""Environment variable that replaces the cache's default directory."""


def cache_root() -> Path:
    """Return the cache's directory (not created here)."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).absolute() if chosen else Path.home() / ".cache" / "finetune-operator"
