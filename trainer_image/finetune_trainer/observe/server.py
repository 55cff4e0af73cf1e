"""The latest state of the run, which the training loop writes, and the HTTP server with which rank 0 reports it.

/progress is for the operator, /metrics for Prometheus, and /healthz for anyone.
"""

from __future__ import annotations

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
    """The progress and the totals of this attempt, which are always from the same moment."""

    def __init__(self, progress: Progress, is_stalled: Callable[[], bool]) -> None:
        """is_stalled: whether training makes no progress; called at each request for /healthz."""
        # Only the training loop replaces this pair, and always as a whole, so other threads see values from the same moment.
        self._state = progress, Totals()
        self.is_stalled = is_stalled
        self._registry = CollectorRegistry()
        self._registry.register(self)

    @property
    def progress(self) -> Progress:
        return self._state[0]

    @property
    def totals(self) -> Totals:
        return self._state[1]

    def update(self, totals: Totals | None = None, **changes: Any) -> None:
        """Replace the totals, and change fields of the progress."""
        progress, earlier = self._state
        self._state = progress.model_copy(update=changes), totals or earlier

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for Prometheus' library."""
        return families(*self._state)

    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


@contextmanager
def serving(run_metrics: RunMetrics, port: int) -> Iterator[int]:
    """Answer requests on all interfaces while the body runs, and yield the port. port: 0 takes any free port. Raises OSError."""

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
