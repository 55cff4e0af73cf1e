"""/healthz, /readyz and /metrics on one port, served by a thread so that a busy event loop does not fail the probes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

BEAT_SECONDS = 5.0
STALL_SECONDS = 120.0
"""A main loop silent for this long will not recover; a burst of objects stalls it for a few seconds at most."""


class Health:
    """What the probes answer. Written by the main loop, read by the server's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat = clock()
        self.is_ready = False
        """Standing by, or working with a complete cache."""
        self.is_leading = False

    def beat(self) -> None:
        """The main loop is alive."""
        self._beat = self._clock()

    @property
    def is_alive(self) -> bool:
        """Whether the main loop has shown life lately."""
        return self._clock() - self._beat < STALL_SECONDS


class HealthServer:
    """The HTTP server. `address` tells host and port once it is started."""

    def __init__(self, host: str, port: int, health: Health, registry: CollectorRegistry) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif self.path == "/healthz":
                    self._verdict(health.is_alive, "the main loop is stalled")
                elif self.path == "/readyz":
                    self._verdict(health.is_ready, "waiting for the CustomResourceDefinitions or the first complete list")
                else:
                    self._answer(404, "text/plain", b"not found\n")

            def _verdict(self, good: bool, why_not: str) -> None:
                self._answer(200 if good else 503, "text/plain", b"ok\n" if good else f"{why_not}\n".encode())

            def _answer(self, code: int, content_type: str, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Probes are no news."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def stop(self) -> None:
        """End and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
