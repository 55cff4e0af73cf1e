"""Events are written when there is time, each once, and never at the cost of a pass."""

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from finetune_job.api.status import FineTuneJobStatus, PlanChoice, PlanStatus
from finetune_job.reasons import Reason
from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.recorder import LONGEST_WAIT, MOST_TRIES, EventRecorder
from finetune_operator.decide.actions import Emit
from finetune_operator.decide.observed import JobView
from tests.unit.finetune_operator.cluster.fakes import Clock, FakeApi

JOB = JobView(namespace="team", name="tune", uid="job-uid", generation=1, resource_version="7", spec=None)
EVENT = Emit("Warning", Reason.RESTARTING, "again")


class EventApi(FakeApi):
    """Keeps what events say, and tells of each that is created."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    async def create(self, kind: Any, namespace: str, body: Any) -> Any:
        made = await super().create(kind, namespace, body)
        self.written.set()
        return made

    async def patch(self, kind: Any, namespace: str, name: str, patch: Any, *, subresource: str | None = None) -> Any:
        found = await super().patch(kind, namespace, name, patch, subresource=subresource)
        self.objects[kind.name, namespace, name].update({key: patch[key] for key in ("count", "lastTimestamp")})
        return found

    @property
    def counts(self) -> list[int]:
        return [item["count"] for (kind, _, _), item in self.objects.items() if kind == "Event"]

    @property
    def verbs(self) -> list[str]:
        return [verb for verb, _, _ in self.calls]


def run(scenario: Callable[[Any], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario(EventApi())

    asyncio.run(bounded())


def test_event_says_who_what_and_about_which_job() -> None:
    async def scenario(api: Any) -> None:
        recorder = EventRecorder(api, "operator-1")
        recorder.record(JOB, Emit("Warning", Reason.RESTARTING, "x" * 5000))
        await recorder.flush(60)
        [event] = api.objects.values()
        assert event["involvedObject"]["uid"] == "job-uid"
        assert event["involvedObject"]["resourceVersion"] == "7"
        assert (event["type"], event["reason"], event["count"]) == ("Warning", "Restarting", 1)
        assert event["reportingInstance"] == "operator-1"
        assert len(event["message"]) == 1024

    run(scenario)


def test_noting_an_event_asks_nothing_of_the_server() -> None:
    async def scenario(api: Any) -> None:
        recorder = EventRecorder(api, "test")
        recorder.record(JOB, EVENT)
        assert api.calls == []
        assert recorder.num_waiting == 1

    run(scenario)


def test_event_that_waits_holds_no_job_in_memory() -> None:
    def job(number: int) -> JobView:
        choices = [PlanChoice(field=f"spec.field{choice}", value="1", reason=f"{number}") for choice in range(40)]
        return replace(JOB, name=f"tune-{number}", status=FineTuneJobStatus(plan=PlanStatus(hash="0" * 64, choices=choices)))

    recorder = EventRecorder(EventApi(), "operator-1")
    recorder.record(job(0), EVENT)
    tracemalloc.start()
    try:
        for number in range(1, 201):
            recorder.record(job(number), EVENT)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert recorder.num_waiting == 201
    assert held < 200 * 2_000  # bytes; such a job is 25,000


def test_same_event_that_waits_is_written_once_with_its_count() -> None:
    async def scenario(api: Any) -> None:
        recorder = EventRecorder(api, "test")
        for _ in range(3):
            recorder.record(JOB, EVENT)
        await recorder.flush(60)
        assert (api.verbs, api.counts) == (["create"], [3])

    run(scenario)


def test_event_that_comes_again_later_is_counted_up() -> None:
    async def scenario(api: Any) -> None:
        recorder = EventRecorder(api, "test")
        recorder.record(JOB, EVENT)
        await recorder.flush(60)
        recorder.record(JOB, EVENT)
        recorder.record(JOB, EVENT)
        await recorder.flush(60)
        assert (api.verbs, api.counts) == (["create", "patch"], [3])

    run(scenario)


def test_event_that_the_server_has_forgotten_is_created_again() -> None:
    async def scenario(api: Any) -> None:
        recorder = EventRecorder(api, "test")
        recorder.record(JOB, EVENT)
        await recorder.flush(60)
        api.objects.clear()
        recorder.record(JOB, EVENT)
        await recorder.flush(60)
        assert (api.verbs, api.counts) == (["create", "patch", "create"], [2])

    run(scenario)


def test_event_of_an_earlier_process_is_counted_up_from_what_it_left() -> None:
    async def scenario(api: Any) -> None:
        earlier = EventRecorder(api, "earlier")
        for _ in range(4):
            earlier.record(JOB, EVENT)
        await earlier.flush(60)
        recorder = EventRecorder(api, "test")
        for _ in range(2):
            recorder.record(JOB, EVENT)
        await recorder.flush(60)
        assert api.counts == [6]
        recorder.record(JOB, EVENT)
        await recorder.flush(60)
        assert api.counts == [7]

    run(scenario)


def test_event_without_an_answer_waits_in_its_place_and_is_given_up_in_the_end() -> None:
    async def scenario(api: Any) -> None:
        dropped: list[int] = []
        recorder = EventRecorder(api, "test", dropped=lambda: dropped.append(1))
        recorder.record(JOB, EVENT)
        recorder.record(JOB, Emit("Normal", Reason.COMPLETED, "done"))
        api.fail["create"] = [ApiUnreachableError("away")]
        assert not await recorder.write_next()
        await recorder.flush(60)
        assert [(item["reason"], item["count"]) for item in api.objects.values()] == [("Restarting", 1), ("Completed", 1)]
        recorder.record(JOB, Emit("Normal", Reason.FINDING, "never"))
        api.fail["create"] = [ApiUnreachableError("away")] * MOST_TRIES
        for _ in range(MOST_TRIES):
            assert dropped == []
            await recorder.write_next()
        assert (recorder.num_waiting, dropped) == (0, [1])

    run(scenario)


def test_event_that_is_refused_holds_up_no_other() -> None:
    async def scenario(api: Any) -> None:
        recorder = EventRecorder(api, "test")
        api.fail["create"] = [ApiError("POST", 403, "Forbidden", "quota")]
        recorder.record(JOB, EVENT)
        recorder.record(JOB, Emit("Normal", Reason.COMPLETED, "done"))
        await recorder.flush(60)
        assert [item["reason"] for item in api.objects.values()] == ["Completed"]

    run(scenario)


def test_what_finds_the_line_full_is_left_out_and_counted() -> None:
    async def scenario(api: Any) -> None:
        dropped: list[int] = []
        recorder = EventRecorder(api, "test", most_waiting=2, dropped=lambda: dropped.append(1))
        for number in range(5):
            recorder.record(JOB, Emit("Normal", Reason.FINDING, str(number)))
        recorder.record(JOB, Emit("Normal", Reason.FINDING, "0"))
        assert (recorder.num_waiting, len(dropped)) == (2, 3)
        await recorder.flush(60)
        assert api.counts == [2, 1]

    run(scenario)


def test_event_that_gave_way_for_long_enough_is_written_although_passes_wait() -> None:
    async def scenario(api: Any) -> None:
        clock = Clock()
        recorder = EventRecorder(api, "test", is_busy=lambda: True, clock=clock)
        recorder.record(JOB, EVENT)
        clock.now += 10.0
        writing = asyncio.create_task(recorder.run())
        for _ in range(5):
            await asyncio.sleep(0)
        writing.cancel()
        assert api.counts == [1]

    run(scenario)


def test_events_give_way_to_passes_and_not_for_ever() -> None:
    async def scenario(api: Any) -> None:
        clock = Clock()
        recorder = EventRecorder(api, "test", is_busy=lambda: True, clock=clock)
        writing = asyncio.create_task(recorder.run())
        recorder.record(JOB, EVENT)
        for _ in range(5):
            await asyncio.sleep(0)
        assert api.calls == []
        clock.now += LONGEST_WAIT
        await written(api)
        writing.cancel()
        assert api.counts == [1]

    run(scenario)


def test_events_are_written_as_they_come() -> None:
    async def scenario(api: Any) -> None:
        recorder = EventRecorder(api, "test")
        writing = asyncio.create_task(recorder.run())
        for number in range(2):
            api.written.clear()
            recorder.record(JOB, Emit("Normal", Reason.FINDING, str(number)))
            await written(api)
        writing.cancel()
        assert api.counts == [1, 1]

    run(scenario)


async def written(api: Any) -> None:
    await api.written.wait()


def test_flush_ends_in_time_although_the_server_does_not_answer() -> None:
    class Silent(EventApi):
        async def create(self, *arguments: Any) -> Any:
            await asyncio.Event().wait()

    async def scenario(_: Any) -> None:
        silent: Any = Silent()
        recorder = EventRecorder(silent, "test")
        recorder.record(JOB, EVENT)
        await recorder.flush(0.01)

    run(scenario)
