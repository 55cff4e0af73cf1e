"""The client against a real HTTP server that misbehaves as API servers do."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.api import ATTEMPTS, LISTINGS, AnsweredRequest, Api
from finetune_operator.cluster.in_flight import RequestLimiter
from finetune_operator.cluster.kinds import BATCH_JOBS, PODS

Handler = Callable[[web.Request], Awaitable[web.Response]]


def refusal(code: int, reason: str, retry_after: str = "") -> web.Response:
    headers = {"Retry-After": retry_after} if retry_after else {}
    return web.json_response({"kind": "Status", "reason": reason, "message": "because"}, status=code, headers=headers)


def against(handler: Handler, scenario: Callable[[Api, list[float]], Awaitable[Any]], **options: Any) -> Any:
    """Run a scenario with a client of a server that answers everything with `handler`; slept seconds are collected."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def run() -> Any:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        configuration = Configuration(host=f"http://{host}:{port}")
        api = Api(configuration, sleep=sleep, **options)
        try:
            return await scenario(api, slept)
        finally:
            await api.close()
            await runner.cleanup()

    return asyncio.run(run())


def test_pages_are_put_together_and_an_expired_list_is_begun_again() -> None:
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

    async def scenario(api: Api, _: list[float]) -> Any:
        return await api.list(PODS, "team", label_selector="a=b")

    assert against(handler, scenario) == ([{"n": 1}, {"n": 2}], "9")
    assert asked == ["", "expired", "", "second"]


def test_retry_after_is_honoured_and_not_for_ever() -> None:
    answers = [refusal(429, "TooManyRequests", "3"), refusal(503, "", "100"), web.json_response({"metadata": {}})]
    seen: list[AnsweredRequest] = []

    async def handler(_: web.Request) -> web.Response:
        return answers.pop(0)

    async def scenario(api: Api, slept: list[float]) -> None:
        await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})
        assert slept == [3.0, 30.0]

    against(handler, scenario, observer=seen.append)
    assert seen == [("POST", "jobs", "429", "TooManyRequests"), ("POST", "jobs", "503", ""), ("POST", "jobs", "200", "")]

    async def always(_: web.Request) -> web.Response:
        return refusal(429, "TooManyRequests", "1")

    async def gives_up(api: Api, slept: list[float]) -> None:
        with pytest.raises(ApiError) as error:
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})
        assert (error.value.code, error.value.retry_after) == (429, 1.0)
        assert len(slept) == ATTEMPTS - 1

    against(always, gives_up)


def test_refusals_are_told_apart() -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.method == "POST":
            return refusal(409, "AlreadyExists")
        return refusal(409, "Conflict") if request.method == "PATCH" else refusal(404, "NotFound")

    async def scenario(api: Api, _: list[float]) -> None:
        with pytest.raises(ApiError) as taken:
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})
        assert taken.value.is_already_exists
        assert not taken.value.is_conflict
        with pytest.raises(ApiError) as outdated:
            await api.patch(BATCH_JOBS, "team", "a", {})
        assert outdated.value.is_conflict
        assert await api.get(BATCH_JOBS, "team", "a") is None

    against(handler, scenario)


def test_every_delete_is_in_the_foreground_and_names_its_uid() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({})

    async def scenario(api: Api, _: list[float]) -> None:
        await api.delete(BATCH_JOBS, "team", "a", uid="u")

    against(handler, scenario)
    assert bodies[0]["propagationPolicy"] == "Foreground"
    assert bodies[0]["preconditions"] == {"uid": "u"}


def test_only_a_forced_deletion_has_no_grace_period() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({})

    async def scenario(api: Api, _: list[float]) -> None:
        await api.delete(PODS, "team", "lost", uid="u", force=True)
        await api.delete(PODS, "team", "other", uid="v")

    against(handler, scenario)
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
    assert bodies == [
        options | {"preconditions": {"uid": "u"}, "gracePeriodSeconds": 0},
        options | {"preconditions": {"uid": "v"}},
    ]


def test_connection_that_breaks_after_the_request_says_so() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def scenario(api: Api, _: list[float]) -> None:
        with pytest.raises(ApiUnreachableError):
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})

    against(handler, scenario)


@pytest.mark.parametrize("code", [429, 500, 503, 504])
def test_refusal_that_asks_for_no_pause_is_not_sent_again(code: int) -> None:
    async def handler(_: web.Request) -> web.Response:
        return refusal(code, "Broken")

    async def scenario(api: Api, slept: list[float]) -> None:
        with pytest.raises(ApiError) as error:
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})
        assert (error.value.code, error.value.reason, error.value.retry_after) == (code, "Broken", 0.0)
        assert slept == []

    against(handler, scenario)


@pytest.mark.parametrize("code", [500, 504])
def test_server_that_asks_for_a_pause_with_an_error_gets_it(code: int) -> None:
    answers = [refusal(code, "InternalError", "2"), web.json_response({"kind": "Job"})]

    async def handler(_: web.Request) -> web.Response:
        return answers.pop(0)

    async def scenario(api: Api, slept: list[float]) -> None:
        assert await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}}) == {"kind": "Job"}
        assert slept == [2.0]

    against(handler, scenario)


@pytest.mark.parametrize("code", [400, 403, 404, 409, 410, 422])
def test_refusal_for_good_is_final_whatever_pause_comes_with_it(code: int) -> None:
    async def handler(_: web.Request) -> web.Response:
        return refusal(code, "No", "1")

    async def scenario(api: Api, slept: list[float]) -> None:
        with pytest.raises(ApiError):
            await api.patch(BATCH_JOBS, "team", "a", {})
        assert slept == []

    against(handler, scenario)


NOW = 1_784_894_400.0
"""2026-07-24 12:00:00 UTC."""


def test_pause_given_as_a_date_is_slept() -> None:
    answers = [refusal(429, "TooManyRequests", "Fri, 24 Jul 2026 12:00:05 GMT"), web.json_response({})]

    async def handler(_: web.Request) -> web.Response:
        return answers.pop(0)

    async def scenario(api: Api, slept: list[float]) -> None:
        await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})
        assert slept == [5.0]

    against(handler, scenario, clock=lambda: NOW)


@pytest.mark.parametrize(
    ("content", "reason", "message"),
    [
        (b"<html>upstream</html>", "", "<html>upstream</html>"),
        (b"", "", ""),
        (b"[1]", "", "[1]"),
        (b'"text"', "", '"text"'),
        (b'{"reason": null, "message": 7}', "", "7"),
        (b"\xff" * 3, "", "\ufffd\ufffd\ufffd"),
    ],
)
def test_refusal_in_any_shape_is_a_refusal(content: bytes, reason: str, message: str) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=502, body=content)

    async def scenario(api: Api, _: list[float]) -> None:
        with pytest.raises(ApiError) as error:
            await api.get(BATCH_JOBS, "team", "a")
        assert (error.value.code, error.value.reason) == (502, reason)
        assert str(error.value).endswith(f": {message}")

    against(handler, scenario)


@pytest.mark.parametrize("content", [b"<html>", b"", b"[]", b"null", b'{"kind": '])
def test_success_that_is_no_json_object_is_no_answer(content: bytes) -> None:
    # A proxy between us and the API server said it: whether the write happened is not known.
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=content)

    async def scenario(api: Api, _: list[float]) -> None:
        with pytest.raises(ApiUnreachableError):
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})
        with pytest.raises(ApiUnreachableError):
            await api.list(PODS)

    against(handler, scenario)


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
def test_list_in_another_shape_is_no_answer(page: dict[str, Any]) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(page)

    async def scenario(api: Api, _: list[float]) -> None:
        with pytest.raises(ApiUnreachableError):
            await api.list(PODS)

    against(handler, scenario)


@pytest.mark.parametrize("items", [{"items": None}, {"items": []}, {}])
def test_list_of_nothing_is_empty(items: dict[str, Any]) -> None:
    # An API server answers a PartialObjectMetadataList of nothing with `"items": null`.
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "5"}, **items})

    async def scenario(api: Api, _: list[float]) -> Any:
        return await api.list(PODS, metadata_only=True)

    assert against(handler, scenario) == ([], "5")


def test_list_that_expires_again_and_again_is_given_up() -> None:
    begun = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal begun
        if "continue" in request.query:
            return refusal(410, "Expired")
        begun += 1
        return web.json_response({"metadata": {"resourceVersion": "9", "continue": "more"}, "items": [{}]})

    async def scenario(api: Api, _: list[float]) -> None:
        with pytest.raises(ApiError) as error:
            await api.list(PODS)
        assert error.value.code == 410

    against(handler, scenario)
    assert begun == LISTINGS


def test_server_that_does_not_answer_in_time_is_unreachable() -> None:
    async def handler(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    seen: list[AnsweredRequest] = []

    async def scenario(api: Api, _: list[float]) -> None:
        with pytest.raises(ApiUnreachableError):
            await api.get(PODS, "team", "a")

    against(handler, scenario, request_timeout=0.05, observer=seen.append)
    assert seen == [("GET", "pods", "error", "")]


def test_reads_and_writes_share_the_places_and_a_pause_takes_none() -> None:
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

    limit = RequestLimiter(most=4, least=1)

    async def scenario(api: Api, slept: list[float]) -> None:
        writes = (api.create(BATCH_JOBS, f"team-{number}", {"metadata": {"name": "a"}}) for number in range(10))
        reads = (api.list(PODS, f"team-{number}") for number in range(10))
        await asyncio.gather(*writes, *reads)
        assert len(slept) == 20

    against(handler, scenario, in_flight=limit)
    assert most == 4
    assert limit.num_running == 0


@pytest.mark.parametrize(("code", "limit_after"), [(429, 25), (503, 25), (500, 50), (409, 50)])
def test_only_a_server_that_is_overloaded_is_asked_less_at_a_time(code: int, limit_after: int) -> None:
    async def handler(_: web.Request) -> web.Response:
        return refusal(code, "No", "1")

    limit = RequestLimiter(most=50, clock=lambda: 0.0)

    async def scenario(api: Api, _: list[float]) -> None:
        with pytest.raises(ApiError):
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})

    against(handler, scenario, in_flight=limit)
    assert limit.limit == limit_after
