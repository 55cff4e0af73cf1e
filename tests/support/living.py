"""Finds which of some processes still run, while they end."""

from collections.abc import Iterable

import psutil


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that have not ended. A process that was not waited for has ended."""
    return [process for process in processes if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        # It ended between the two questions.
        return False
