"""The latest state of the run: written by the training loop, read by request threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from finetune_job.progress import Progress
from finetune_trainer.observe.metrics import Totals, families


class Board(Collector):
    """Progress and totals of this attempt, always of the same moment."""

    def __init__(self, progress: Progress, is_stalled: Callable[[], bool]) -> None:
        """`is_stalled`: whether training stands still; asked at each request for /healthz."""
        self._lock = threading.Lock()
        self._progress, self._totals = progress, Totals()
        self.is_stalled = is_stalled
        self._registry = CollectorRegistry()
        self._registry.register(self)

    @property
    def progress(self) -> Progress:
        with self._lock:
            return self._progress

    @property
    def totals(self) -> Totals:
        with self._lock:
            return self._totals

    def update(self, totals: Totals | None = None, **changes: Any) -> None:
        """Replace the totals, and change fields of the progress."""
        with self._lock:
            self._totals = totals or self._totals
            self._progress = self._progress.model_copy(update=changes)

    def collect(self) -> Iterable[Metric]:
        """For Prometheus' library."""
        with self._lock:
            progress, totals = self._progress, self._totals
        return families(progress, totals)

    def metrics(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
