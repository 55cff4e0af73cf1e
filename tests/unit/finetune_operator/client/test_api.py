"""The client against a real HTTP server that misbehaves as API servers do."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from finetune_operator.client.answers import AnsweredRequest, ApiError, ApiUnreachableError
from finetune_operator.client.api import ATTEMPTS, LISTINGS, Api
from finetune_operator.client.kinds import BATCH_JOBS, PODS

Handler = Callable[[web.Request], Awaitable[web.Response]]


def refusal(code: int, reason: str, retry_after: str = "") -> web.Response:
    headers = {"Retry-After": retry_after} if retry_after else {}
    return web.json_response({"kind": "Status", "reason": reason, "message": "because"}, status=code, headers=headers)


@asynccontextmanager
async def serving(handler: Handler, **options: Any) -> AsyncIterator[tuple[Api, list[float]]]:
    """A client of a server that answers everything with `handler`, and the seconds that the client has slept."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    api = Api(Configuration(host=f"http://{host}:{port}"), sleep=sleep, **options)
    try:
        yield api, slept
    finally:
        await api.close()
        await runner.cleanup()


async def test_pages_are_put_together_and_an_expired_list_is_begun_again() -> None:
    asked: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        token = request.query.get("continue", "")
        asked.append(token)
        if token == "expired":
            return refusal(410, "Expired")
        if token == "second":
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": [{"n": 2}]})
        after = "expired" if len(asked) == 1 else "second"
        return web.json_response({"metadata": {"resourceVersion": "9", "continue": after}, "items": [{"n": 1}]})

    async with serving(handler) as (api, _):
        assert await api.list(PODS, "team", label_selector="a=b") == [{"n": 1}, {"n": 2}]
    assert asked == ["", "expired", "", "second"]


async def test_retry_after_is_honoured_and_not_for_ever() -> None:
    answers = [refusal(429, "TooManyRequests", "3"), refusal(503, "", "100"), web.json_response({"metadata": {}})]
    seen: list[AnsweredRequest] = []

    async def handler(_: web.Request) -> web.Response:
        return answers.pop(0)

    async with serving(handler, observer=seen.append) as (api, slept):
        await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})
        assert slept == [3.0, 30.0]
    assert seen == [("POST", "jobs", "429", "TooManyRequests"), ("POST", "jobs", "503", ""), ("POST", "jobs", "200", "")]

    async def always(_: web.Request) -> web.Response:
        return refusal(429, "TooManyRequests", "1")

    async with serving(always) as (api, slept):
        with pytest.raises(ApiError) as error:
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})
        assert (error.value.code, error.value.retry_after) == (429, 1.0)
        assert len(slept) == ATTEMPTS - 1


async def test_refusals_are_distinguished() -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.method == "POST":
            return refusal(409, "AlreadyExists")
        return refusal(409, "Conflict") if request.method == "PATCH" else refusal(404, "NotFound")

    async with serving(handler) as (api, _):
        with pytest.raises(ApiError) as taken:
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})
        assert taken.value.is_already_exists
        assert not taken.value.is_conflict
        with pytest.raises(ApiError) as outdated:
            await api.patch(BATCH_JOBS, "team", "a", {})
        assert outdated.value.is_conflict
        assert await api.get(BATCH_JOBS, "team", "a") is None


async def test_only_a_forced_deletion_has_no_grace_period() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({})

    async with serving(handler) as (api, _):
        await api.delete(PODS, "team", "lost", uid="u", force=True)
        await api.delete(PODS, "team", "other", uid="v")
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
    assert bodies == [
        options | {"preconditions": {"uid": "u"}, "gracePeriodSeconds": 0},
        options | {"preconditions": {"uid": "v"}},
    ]


async def test_connection_that_breaks_after_the_request_says_so() -> None:
    async def handler(request: web.Request) -> web.Response:
        request.transport.abort()
        return web.Response()

    async with serving(handler) as (api, _):
        with pytest.raises(ApiUnreachableError):
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})


@pytest.mark.parametrize("code", [429, 500, 503, 504])
async def test_refusal_that_asks_for_no_pause_is_not_sent_again(code: int) -> None:
    async def handler(_: web.Request) -> web.Response:
        return refusal(code, "Broken")

    async with serving(handler) as (api, slept):
        with pytest.raises(ApiError) as error:
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})
        assert (error.value.code, error.value.reason, error.value.retry_after) == (code, "Broken", 0.0)
        assert slept == []


@pytest.mark.parametrize("code", [500, 504])
async def test_server_that_asks_for_a_pause_with_an_error_gets_it(code: int) -> None:
    answers = [refusal(code, "InternalError", "2"), web.json_response({"kind": "Job"})]

    async def handler(_: web.Request) -> web.Response:
        return answers.pop(0)

    async with serving(handler) as (api, slept):
        assert await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}}) == {"kind": "Job"}
        assert slept == [2.0]


@pytest.mark.parametrize("code", [400, 403, 404, 409, 410, 422])
async def test_refusal_for_good_is_final_whatever_pause_comes_with_it(code: int) -> None:
    async def handler(_: web.Request) -> web.Response:
        return refusal(code, "No", "1")

    async with serving(handler) as (api, slept):
        with pytest.raises(ApiError):
            await api.patch(BATCH_JOBS, "team", "a", {})
        assert slept == []


@pytest.mark.parametrize(
    ("content", "reason", "message"),
    [
        (b"<html>upstream</html>", "", "<html>upstream</html>"),
        (b"", "", ""),
        (b"x" * 600, "", "x" * 500),
        (b"[1]", "", "[1]"),
        (b'"text"', "", '"text"'),
        (b'{"reason": null, "message": 7}', "", "7"),
        (b"\xff" * 3, "", "\ufffd\ufffd\ufffd"),
    ],
)
async def test_refusal_in_any_shape_is_a_refusal(content: bytes, reason: str, message: str) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=502, body=content)

    async with serving(handler) as (api, _):
        with pytest.raises(ApiError) as error:
            await api.get(BATCH_JOBS, "team", "a")
        assert (error.value.code, error.value.reason) == (502, reason)
        assert str(error.value).endswith(f": {message}")


@pytest.mark.parametrize("content", [b"<html>", b"", b"[]", b"null", b'{"kind": '])
async def test_success_that_is_no_json_object_is_no_answer(content: bytes) -> None:
    # A proxy between us and the API server said it: whether the write happened is not known.
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=content)

    async with serving(handler) as (api, _):
        with pytest.raises(ApiUnreachableError):
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})
        with pytest.raises(ApiUnreachableError):
            await api.list(PODS)


@pytest.mark.parametrize(
    "page",
    [
        {},
        {"items": []},
        {"items": [], "metadata": None},
        {"items": [], "metadata": {}},
        {"items": {"a": 1}, "metadata": {"resourceVersion": "1"}},
    ],
)
async def test_list_in_another_shape_is_no_answer(page: dict[str, Any]) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(page)

    async with serving(handler) as (api, _):
        with pytest.raises(ApiUnreachableError):
            await api.list(PODS)


@pytest.mark.parametrize("items", [{"items": None}, {"items": []}, {}])
async def test_list_of_nothing_is_empty(items: dict[str, Any]) -> None:
    # An API server answers a PartialObjectMetadataList of nothing with `"items": null`.
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "5"}, **items})

    async with serving(handler) as (api, _):
        assert await api.list(PODS, metadata_only=True) == []


async def test_list_that_expires_again_and_again_is_given_up() -> None:
    begun = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal begun
        if "continue" in request.query:
            return refusal(410, "Expired")
        begun += 1
        return web.json_response({"metadata": {"resourceVersion": "9", "continue": "more"}, "items": [{}]})

    async with serving(handler) as (api, _):
        with pytest.raises(ApiError) as error:
            await api.list(PODS)
        assert error.value.code == 410
    assert begun == LISTINGS


async def test_server_that_does_not_answer_in_time_is_unreachable() -> None:
    async def handler(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    seen: list[AnsweredRequest] = []

    async with serving(handler, request_timeout=0.05, observer=seen.append) as (api, _):
        with pytest.raises(ApiUnreachableError):
            await api.get(PODS, "team", "a")
    assert seen == [("GET", "pods", "error", "")]


async def test_reads_and_writes_share_the_places_and_a_pause_takes_none() -> None:
    most = 0
    running = 0
    refused: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        if request.path not in refused:
            refused.append(request.path)
            return refusal(429, "TooManyRequests", "1")
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    async with serving(handler, most_in_flight=4) as (api, slept):
        writes = (api.create(BATCH_JOBS, f"team-{number}", {"metadata": {"name": "a"}}) for number in range(10))
        reads = (api.list(PODS, f"team-{number}") for number in range(10))
        await asyncio.gather(*writes, *reads)
        assert len(slept) == 20
    assert most == 4
