"""Rank 0's answers over HTTP: /progress for the operator, /metrics for Prometheus, /healthz for whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from finetune_trainer.observe.board import Board


@contextmanager
def serving(board: Board, port: int) -> Iterator[int]:
    """Answer on all interfaces in daemon threads while the body runs; the port: 0 takes any free one. Raises OSError."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/progress":
                self._answer(200, "application/json", board.progress.model_dump_json().encode())
            elif self.path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, board.metrics())
            elif self.path == "/healthz":
                stalled = board.is_stalled()
                self._answer(503 if stalled else 200, "text/plain", b"training stands still\n" if stalled else b"ok\n")
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
    # How long the end of a run waits for the thread.
    threading.Thread(target=server.serve_forever, args=(0.1,), name="observe", daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
