"""The watch of events against a real HTTP server that ends, refuses, and sends what nobody should."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from finetune_operator.cluster.api import Api
from finetune_operator.cluster.stream_watch import LONGEST_PAUSE, WARNINGS_SELECTOR, EventWatch, lines
from tests.unit.finetune_operator.cluster.test_api import against, refusal

Stream = Callable[[web.Request], Awaitable[web.StreamResponse]]


def line(kind: str, version: int, **about: Any) -> bytes:
    return json.dumps({"type": kind, "object": {"metadata": {"resourceVersion": str(version)}, **about}}).encode() + b"\n"


class Served:
    """Each watch gets the next answer; after the last one the test is over."""

    def __init__(self, *answers: bytes | web.Response) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.taken: list[Any] = []
        self.pauses: list[float] = []
        self.is_asked_once = False
        """Whether no namespace is watched a second time."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        self.paths.append(request.path)
        answer = self.answers.pop(0)
        if isinstance(answer, web.Response):
            return answer
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(answer)
        await response.write_eof()
        return response

    def run(self, *namespaces: str) -> None:
        async def scenario(api: Api, _: list[float]) -> None:
            over = asyncio.Event()

            async def sleep(seconds: float) -> None:
                self.pauses.append(seconds)
                if not self.answers:
                    over.set()
                if not self.answers or self.is_asked_once:
                    await asyncio.Event().wait()

            watching = asyncio.create_task(EventWatch(api, namespaces, self.taken.append, sleep).run())
            await asyncio.wait_for(over.wait(), 20)
            assert not watching.done()
            watching.cancel()

        against(self.handle, scenario)

    def versions(self) -> list[str]:
        return [query.get("resourceVersion", "") for query in self.asked]


def test_warnings_are_watched_and_continued_from_the_last_one() -> None:
    served = Served(line("ADDED", 5, reason="a") + line("MODIFIED", 6, reason="b") + line("BOOKMARK", 9), line("DELETED", 11))
    served.run()
    assert [event["reason"] for event in served.taken] == ["a", "b"]
    assert served.versions() == ["", "9"]
    assert {query["fieldSelector"] for query in served.asked} == {WARNINGS_SELECTOR}
    assert served.paths[0] == "/api/v1/events"
    assert served.pauses == [1.0, 1.0]


def test_served_namespaces_are_watched_one_by_one() -> None:
    served = Served(line("BOOKMARK", 1), line("BOOKMARK", 2))
    served.is_asked_once = True
    served.run("a", "b")
    assert sorted(served.paths) == ["/api/v1/namespaces/a/events", "/api/v1/namespaces/b/events"]


def test_expired_watch_begins_with_everything_again_at_once() -> None:
    gone = json.dumps({"type": "ERROR", "object": {"code": 410, "message": "too old"}}).encode() + b"\n"
    served = Served(line("ADDED", 5) + gone, line("ADDED", 5))
    served.run()
    assert served.versions() == ["", ""]
    assert served.pauses[0] == 1.0


def test_errors_of_the_server_are_survived_with_longer_and_longer_pauses() -> None:
    broken = json.dumps({"type": "ERROR", "object": {"code": 500, "message": "etcd"}}).encode() + b"\n"
    served = Served(line("ADDED", 5), *(refusal(403, "Forbidden") for _ in range(6)), broken, line("ADDED", 7))
    served.run()
    assert served.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_PAUSE, LONGEST_PAUSE, 1.0]
    assert len(served.taken) == 2


def test_lines_that_nobody_can_read_are_passed_over() -> None:
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n"
    hostile = b"\n" + b"not json\n" + b"[1]\n" + b"null\n" + b'{"type": 7, "object": "x"}\n' + b"\xff\xfe\n" + deep
    served = Served(hostile + line("ADDED", 5, reason="good"))
    served.run()
    assert [event["reason"] for event in served.taken] == ["good"]


def test_an_event_that_nobody_thought_of_keeps_none_behind_it_from_being_taken() -> None:
    served = Served(line("ADDED", 5, reason="defect") + line("ADDED", 6, reason="good"), line("ADDED", 7, reason="good"))
    served.taken = _FailingOnce()
    served.run()
    assert [event["reason"] for event in served.taken] == ["good", "good"]
    assert served.pauses == [1.0, 1.0]
    assert served.versions() == ["", "6"]


class _FailingOnce(list[Any]):
    def append(self, event: Any) -> None:
        if event["reason"] == "defect":
            raise ValueError("a defect")
        super().append(event)


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_lines_are_put_together_whatever_the_chunks_and_the_longest_are_left_out(
    size: int,
) -> None:
    text = b"a" * 50 + b"\n" + b"b" * 51 + b"\n" + b"c\n" + b"d" * 500 + b"\n" + b"e\nunfinished"

    async def chunks() -> Any:
        for start in range(0, len(text), size):
            yield text[start : start + size]

    async def scenario() -> list[bytes]:
        return [one async for one in lines(chunks(), 50)]

    assert asyncio.run(scenario()) == [b"a" * 50, b"c", b"e"]
