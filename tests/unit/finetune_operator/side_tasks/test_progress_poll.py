"""Which jobs are asked how far they are, what is passed on of the answers, and what a rank cannot do to the operator."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from finetune_job.progress import Progress
from finetune_operator.client.kinds import BATCH_JOBS, JOBS, PODS, JobKey
from finetune_operator.side_tasks import progress_poll as module
from finetune_operator.side_tasks.progress_poll import LARGEST_ANSWER_BYTES, ProgressPoll
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.passes.test_gather import KEY, Scene, training

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PROGRESS = Progress(attempt=0, step=3, total_steps=4)


def running(index: int = 0, attempt: int = 0, address: str = "127.0.0.1", phase: str = "Running") -> dict[str, Any]:
    return objects.pod(attempt=attempt, index=index, status={"phase": phase, "podIP": address})


def labelled_by_a_stranger() -> dict[str, Any]:
    """A pod with the labels of rank 0 that no Job of the operator's made."""
    pod = running()
    stranger = objects.owner("Job", "notebook", "notebook-uid", "batch/v1")
    pod["metadata"] |= {"name": "notebook", "uid": "notebook-uid", "ownerReferences": [stranger]}
    return pod


class Polled:
    def __init__(self, *pods: dict[str, Any]) -> None:
        self.scene = Scene(status=training(attempt=0))
        self.scene.add(BATCH_JOBS, objects.batch_job())
        for pod in pods:
            self.scene.add(PODS, pod)
        self.woken: list[JobKey] = []
        self.asked: list[str] = []

    def rounds(self, answer: Handler, number: int = 1) -> None:
        async def handle(request: web.Request) -> web.StreamResponse:
            self.asked.append(request.path)
            return await answer(request)

        async def scenario() -> None:
            application = web.Application()
            application.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(application)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            over = asyncio.Event()
            pauses: list[float] = []

            async def sleep(seconds: float) -> None:
                pauses.append(seconds)
                if len(pauses) == number:
                    over.set()
                    await asyncio.Event().wait()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "OBSERVE_PORT", runner.addresses[0][1])
                patch.setattr(module.asyncio, "sleep", sleep)
                poll = ProgressPoll(
                    self.scene.cache, self.scene.gatherer, self.woken.append, period=10.0, longest=60.0, writes_per_second=20.0
                )
                task = asyncio.create_task(poll.run())
                await asyncio.wait_for(over.wait(), 30)
                assert not task.done()
                task.cancel()
            await runner.cleanup()

        asyncio.run(scenario())

    def told(self) -> Progress | None:
        return self.scene.gather().observed.progress


async def good(_: web.Request) -> web.Response:
    return web.Response(text=PROGRESS.model_dump_json())


def test_new_progress_of_rank_zero_wakes_its_job_once() -> None:
    polled = Polled(running())
    polled.rounds(good, number=3)
    assert polled.asked == ["/progress"] * 3
    assert polled.woken == [KEY]
    assert polled.told() == PROGRESS


def test_answer_that_comes_in_pieces_is_read_to_its_end() -> None:
    async def in_pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for letter in PROGRESS.model_dump_json():
            await response.write(letter.encode())
        return response

    polled = Polled(running())
    polled.rounds(in_pieces)
    assert polled.told() == PROGRESS


@pytest.mark.parametrize(
    "pod",
    [running(index=1), running(phase="Pending"), running(address=""), running(attempt=1), labelled_by_a_stranger()],
    ids=["another rank", "not running", "without an address", "of another attempt", "of a stranger"],
)
def test_other_pods_are_not_asked(pod: dict[str, Any]) -> None:
    polled = Polled()
    polled.scene.add(BATCH_JOBS, objects.batch_job(attempt=1))
    polled.scene.add(PODS, pod)
    polled.rounds(good)
    assert polled.asked == []


def test_a_pod_that_the_job_adopted_and_deletes_is_not_asked() -> None:
    adopted = running(address="127.0.0.2")
    later = {"creationTimestamp": "2026-01-02T03:05:05Z", "deletionTimestamp": "2026-01-02T03:06:05Z"}
    adopted["metadata"] |= {"name": "forger", "uid": "forger-uid"} | later
    polled = Polled(running(), adopted)
    polled.rounds(good)
    assert polled.asked == ["/progress"]


def test_job_that_does_not_train_is_not_asked() -> None:
    polled = Polled(running())
    polled.scene.add(JOBS, objects.finetune_job(status={"conditions": [{"type": "Finished", "status": "True"}]}))
    polled.rounds(good)
    assert polled.asked == []


def answers(text: str, status: int = 200) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    return handler


async def elsewhere(_: web.Request) -> web.Response:
    raise web.HTTPFound("/elsewhere")


@pytest.mark.parametrize(
    "handler",
    [
        answers("busy", 503),
        answers("not json"),
        answers("[" * 50_000),
        answers('{"attempt": 0, "step": "many"}'),
        answers(" " * (LARGEST_ANSWER_BYTES + 1) + PROGRESS.model_dump_json()),
        answers(PROGRESS.model_copy(update={"attempt": 7}).model_dump_json()),
        elsewhere,
    ],
    ids=["an error", "no JSON", "deep", "wrong", "endless", "another attempt", "a redirection"],
)
def test_answer_that_cannot_be_used_is_left_out(handler: Handler) -> None:
    polled = Polled(running())
    polled.rounds(handler, number=2)
    assert set(polled.asked) == {"/progress"}
    assert (polled.woken, polled.told()) == ([], None)


def test_rank_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)

    async def silent(_: web.Request) -> web.Response:
        await asyncio.wait_for(asyncio.Event().wait(), 5)
        return web.Response()

    polled = Polled(running())
    polled.rounds(silent)
    assert polled.woken == []
