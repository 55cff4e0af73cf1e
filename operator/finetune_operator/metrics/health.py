"""/healthz, /readyz and /metrics on one port, in a thread of their own so that a busy event loop does not fail the probes."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from finetune_job.http_server import Answer, HttpServer, ReaderCheck

BEAT_SECONDS = 5.0
STALL_SECONDS = 120.0
"""A main loop that gives no sign of life for this long will not recover; bursts of objects stall it for only a few seconds."""

WAITING = "waiting for the CustomResourceDefinitions or the first complete list"


class Health:
    """The state that the probes report. The main loop writes it, and the server's thread reads it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat = clock()
        self.is_ready = False
        """Whether the replica is ready: as a standby, or as the leader with a complete cache."""
        self.is_leading = False

    def beat(self) -> None:
        """Record that the main loop is alive."""
        self._beat = self._clock()

    @property
    def is_alive(self) -> bool:
        """Whether the main loop has called `beat` lately."""
        return self._clock() - self._beat < STALL_SECONDS


def health_server(
    host: str,
    port: int,
    health: Health,
    registry: CollectorRegistry,
    *,
    gate: ReaderCheck | None = None,
    tls: Callable[[], ssl.SSLContext] | None = None,
) -> HttpServer:
    """Build the server, whose `address` is host and port. Raises OSError if it cannot listen."""

    def verdict(good: bool, why_not: str) -> Answer:
        return Answer(b"ok\n") if good else Answer(f"{why_not}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)

    return HttpServer(
        host,
        port,
        {
            "/metrics": lambda: Answer(generate_latest(registry), CONTENT_TYPE_LATEST),
            "/healthz": lambda: verdict(health.is_alive, "the main loop is stalled"),
            "/readyz": lambda: verdict(health.is_ready, WAITING),
        },
        name="health",
        gate=gate,
        tls=tls,
    )
