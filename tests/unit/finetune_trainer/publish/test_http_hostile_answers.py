"""Answers of servers that mean no good, or are broken, end in an error and never in a full memory or an endless loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import httpx2
import pytest

from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.retry import TransientError
from finetune_trainer.publish import http
from finetune_trainer.publish.http import HttpClient
from finetune_trainer.publish.s3_client import Bucket

Responder = Callable[[httpx2.Request], httpx2.Response]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Callable[[Responder], HttpClient]:
    """A wire whose other end is a function."""
    client = httpx2.Client

    def made(respond: Responder) -> HttpClient:
        monkeypatch.setattr(http.httpx2, "Client", lambda **options: client(transport=httpx2.MockTransport(respond), **options))
        return HttpClient(threading.Event())

    return made


def bucket(wire: HttpClient) -> Bucket:
    return Bucket(wire, S3Service("http://store.example", "here"), "out", None)


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


@pytest.mark.parametrize("operation", [lambda b: list(b.list_objects("")), lambda b: b.parts("k", "u"), lambda b: b.uploads("")])
def test_a_listing_that_does_not_advance_is_given_up(
    wire: Callable[[Responder], HttpClient], operation: Callable[[Bucket], object]
) -> None:
    page = (
        b"<Page><IsTruncated>true</IsTruncated><NextContinuationToken>a</NextContinuationToken>"
        b"<NextPartNumberMarker>1</NextPartNumberMarker><NextKeyMarker>k</NextKeyMarker></Page>"
    )
    with pytest.raises(TransientError, match="again and again"):
        operation(bucket(wire(lambda _: httpx2.Response(200, content=page))))


@pytest.mark.parametrize("size", [b"", b"<Size>many</Size>", b"<Size>-1</Size>"])
def test_a_listing_without_sizes_is_given_up(wire: Callable[[Responder], HttpClient], size: bytes) -> None:
    page = b"<Page><Contents><Key>k</Key>" + size + b"</Contents></Page>"
    with pytest.raises(TransientError, match="gives no Size"):
        list(bucket(wire(lambda _: httpx2.Response(200, content=page))).list_objects(""))


def test_pages_follow_one_another(wire: Callable[[Responder], HttpClient]) -> None:
    pages = {
        None: b"<P><Contents><Key>a</Key><Size>1</Size></Contents><IsTruncated>true</IsTruncated>"
        b"<NextContinuationToken>2</NextContinuationToken></P>",
        "2": b"<P><Contents><Key>b</Key><Size>2</Size></Contents><IsTruncated>false</IsTruncated></P>",
    }
    listed = bucket(wire(lambda request: httpx2.Response(200, content=pages[request.url.params.get("continuation-token")])))
    assert list(listed.list_objects("")) == [("a", 1), ("b", 2)]
