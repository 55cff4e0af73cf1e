"""What rank 0 says about the run while it runs: /progress for the operator, /metrics for Prometheus, /healthz."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from finetune_job.progress import Progress

METRICS = {
    "step": "Optimizer steps done.",
    "total_steps": "Optimizer steps of the whole run.",
    "epoch": "Passes over the data done.",
    "loss": "Mean loss over the supervised tokens of the latest step.",
    "eval_loss": "Mean loss over the supervised held-out tokens, latest evaluation.",
    "learning_rate": "Learning rate of the latest step.",
    "tokens_per_second": "Tokens per second over all ranks in the latest step.",
    "checkpoint_step": "Step of the latest complete checkpoint.",
}
"""Field of Progress -> what it means; the metric is `finetune_training_<field>`."""


class ProgressBoard:
    """The latest progress, written by the training loop and read by request threads."""

    def __init__(self, progress: Progress) -> None:
        self._lock = threading.Lock()
        self._progress = progress
        self._registry = CollectorRegistry()
        self._gauges = {name: Gauge(f"finetune_training_{name}", text, registry=self._registry) for name, text in METRICS.items()}
        self.update()

    @property
    def progress(self) -> Progress:
        with self._lock:
            return self._progress

    def update(self, **changes: object) -> None:
        """Change some fields."""
        with self._lock:
            self._progress = self._progress.model_copy(update=changes)
            for name, gauge in self._gauges.items():
                value = getattr(self._progress, name)
                gauge.set(float("nan") if value is None else value)

    def metrics(self) -> bytes:
        """In Prometheus' text format."""
        with self._lock:
            return generate_latest(self._registry)


def serve(board: ProgressBoard, port: int) -> ThreadingHTTPServer:
    """Answer on all interfaces in daemon threads until `shutdown()`; port 0 takes any free one. Raises OSError."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/progress":
                self._answer(200, "application/json", board.progress.model_dump_json().encode())
            elif self.path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, board.metrics())
            elif self.path == "/healthz":
                self._answer(200, "text/plain", b"ok\n")
            else:
                self._answer(404, "text/plain", b"there is /progress, /metrics and /healthz\n")

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests are no news."""

    server = ThreadingHTTPServer(("", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="observe", daemon=True).start()
    return server
