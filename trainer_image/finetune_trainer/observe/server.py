"""Rank 0's answers over HTTP: /progress for the operator, /metrics for Prometheus, /healthz for whoever asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from finetune_job.http_server import Answer, HttpServer
from finetune_trainer.observe.board import Board


@contextmanager
def serving(board: Board, port: int) -> Iterator[int]:
    """Answer on all interfaces in a thread while the body runs; the port: 0 takes any free one. Raises OSError."""

    def health() -> Answer:
        if board.is_stalled():
            return Answer(b"training stands still\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        return Answer(b"ok\n")

    server = HttpServer(
        "",
        port,
        {
            "/progress": lambda: Answer(board.progress.model_dump_json().encode(), "application/json"),
            "/metrics": lambda: Answer(board.metrics(), CONTENT_TYPE_LATEST),
            "/healthz": health,
        },
        name="observe",
    )
    server.start()
    try:
        yield server.address[1]
    finally:
        server.stop()
