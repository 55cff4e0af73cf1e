"""Which of some processes still run, asked while they end."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended. One that nobody has waited for yet has."""
    return [process for process in processes if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        # It ended between the two questions.
        return False
