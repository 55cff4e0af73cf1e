"""The directory of one cluster run: new for each run, locked while in use, and removed afterwards."""

import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO

_PREFIX = "finetune-cluster-"
_LOGS_PREFIX = "finetune-logs-"


class RunDirectory:
    """A temporary directory for a run's certificates, state and logs."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock: IO[str] = _lock_file(self.path).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.logs = self.path / "logs"
        self.logs.mkdir()

    def remove(self, *, keep_logs: bool) -> None:
        """Delete the directory; with `keep_logs`, move the logs out of it first and print where they are."""
        if keep_logs:
            kept = Path(tempfile.mkdtemp(prefix=_LOGS_PREFIX))
            shutil.copytree(self.logs, kept, dirs_exist_ok=True)
            print(f"test cluster: logs kept in {kept}", file=sys.stderr, flush=True)
        shutil.rmtree(self.path)
        self._lock.close()


def _lock_file(directory: Path) -> Path:
    return directory / "in-use.lock"


def _remove_abandoned() -> None:
    """Delete the directories of runs that were killed: those whose lock no process holds."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not _lock_file(directory).exists() or directory.stat().st_uid != os.geteuid():
            continue
        with _lock_file(directory).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(directory, ignore_errors=True)
