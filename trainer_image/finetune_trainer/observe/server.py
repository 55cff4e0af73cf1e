"""The latest state of the run, written by the training loop, and rank 0's answers from it over HTTP.

/progress is for the operator, /metrics for Prometheus, /healthz for anyone who asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from finetune_job.http_server import Answer, HttpServer
from finetune_job.progress import Progress
from finetune_trainer.observe.metrics import Totals, families


class RunMetrics(Collector):
    """Progress and totals of this attempt, always of the same moment."""

    def __init__(self, progress: Progress, is_stalled: Callable[[], bool]) -> None:
        """is_stalled: whether training makes no progress; called at each request for /healthz."""
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
        """Yield the metrics for Prometheus' library."""
        with self._lock:
            progress, totals = self._progress, self._totals
        return families(progress, totals)

    def metrics(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


@contextmanager
def serving(run_metrics: RunMetrics, port: int) -> Iterator[int]:
    """Answer on all interfaces in a thread while the body runs; yields the port. port: 0 takes any free one. Raises OSError."""

    def health() -> Answer:
        if run_metrics.is_stalled():
            return Answer(b"training is stalled\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        return Answer(b"ok\n")

    server = HttpServer(
        "",
        port,
        {
            "/progress": lambda: Answer(run_metrics.progress.model_dump_json().encode(), "application/json"),
            "/metrics": lambda: Answer(run_metrics.metrics(), CONTENT_TYPE_LATEST),
            "/healthz": health,
        },
        name="observe",
    )
    server.start()
    try:
        yield server.address[1]
    finally:
        server.stop()
