"""The client against a real HTTP server that misbehaves as API servers do."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from finetune_operator.cluster.api import ATTEMPTS, Api
from finetune_operator.cluster.errors import ApiError, ApiUnreachableError
from finetune_operator.cluster.kinds import BATCH_JOBS, PODS
from finetune_operator.cluster.token_bucket import TokenBucket

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
        runner = web.AppRunner(application)
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
    seen: list[tuple[str, str]] = []

    async def handler(_: web.Request) -> web.Response:
        return answers.pop(0)

    async def scenario(api: Api, slept: list[float]) -> None:
        await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})
        assert slept == [3.0, 30.0]

    against(handler, scenario, observer=lambda verb, code: seen.append((verb, code)))
    assert seen == [("POST", "429"), ("POST", "503"), ("POST", "200")]

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


def test_connection_that_breaks_after_the_request_says_so() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def scenario(api: Api, _: list[float]) -> None:
        with pytest.raises(ApiUnreachableError):
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})

    against(handler, scenario)


def test_only_writes_take_tokens() -> None:
    taken: list[float] = []

    async def sleep(seconds: float) -> None:
        taken.append(seconds)

    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    async def scenario(api: Api, _: list[float]) -> None:
        for _number in range(3):
            await api.list(PODS)
        assert taken == []
        for _number in range(3):
            await api.create(BATCH_JOBS, "team", {"metadata": {"name": "a"}})

    against(handler, scenario, writes=TokenBucket(1, 1, clock=lambda: 0.0, sleep=sleep))
    assert taken == [1.0, 2.0]
