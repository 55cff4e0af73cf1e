"""Answers of servers that mean no good, or are broken, end in an error and never in a full memory or an endless loop."""

import threading
from collections.abc import Callable, Iterator

import httpx2
import pytest

from finetune_trainer.network.retry import TransientError
from finetune_trainer.publish import http
from finetune_trainer.publish.http import HttpClient

Responder = Callable[[httpx2.Request], httpx2.Response]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Callable[[Responder], HttpClient]:
    """A wire whose other end is a function."""
    client = httpx2.Client

    def made(respond: Responder) -> HttpClient:
        monkeypatch.setattr(http.httpx2, "Client", lambda **options: client(transport=httpx2.MockTransport(respond), **options))
        return HttpClient(threading.Event())

    return made


def test_an_answer_without_end_is_given_up(wire: Callable[[Responder], HttpClient], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_ANSWER_BYTES", 1 << 20)
    given = 0

    def endless() -> Iterator[bytes]:
        nonlocal given
        while True:
            given += 1
            yield b"x" * 65536

    with pytest.raises(TransientError, match="longer than 1 MiB"):
        wire(lambda _: httpx2.Response(200, content=endless())).send("GET", "http://store.example/", {})
    assert given < 64
