"""Events are written when there is time, each once, and never at the cost of a pass."""

import asyncio
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from finetune_job.api.status import FineTuneJobStatus, PlanChoice, PlanStatus
from finetune_job.reasons import Reason
from finetune_operator.client.answers import ApiError, ApiUnreachableError
from finetune_operator.decide.actions import Emit
from finetune_operator.decide.seen.observed import JobView
from finetune_operator.passes.recorder import EventRecorder
from tests.unit.finetune_operator.fakes import FakeApi

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


@pytest.fixture
def api() -> Any:
    return EventApi()


async def test_event_says_who_what_and_about_which_job(api: Any) -> None:
    recorder = EventRecorder(api, "operator-1")
    recorder.record(JOB, Emit("Warning", Reason.RESTARTING, "x" * 5000))
    await recorder.flush(60)
    [event] = api.objects.values()
    assert event["involvedObject"]["uid"] == "job-uid"
    assert event["involvedObject"]["resourceVersion"] == "7"
    assert (event["type"], event["reason"], event["count"]) == ("Warning", "Restarting", 1)
    assert event["reportingInstance"] == "operator-1"
    assert len(event["message"]) == 1024


async def test_noting_an_event_asks_nothing_of_the_server(api: Any) -> None:
    recorder = EventRecorder(api, "test")
    recorder.record(JOB, EVENT)
    assert api.calls == []
    assert recorder.num_waiting == 1


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


async def test_same_event_that_waits_is_written_once_with_its_count(api: Any) -> None:
    recorder = EventRecorder(api, "test")
    for _ in range(3):
        recorder.record(JOB, EVENT)
    await recorder.flush(60)
    assert (api.verbs, api.counts) == (["create"], [3])


async def test_event_that_comes_again_later_is_counted_up_whoever_wrote_it_first(api: Any) -> None:
    earlier = EventRecorder(api, "earlier")
    earlier.record(JOB, EVENT)
    await earlier.flush(60)
    recorder = EventRecorder(api, "test")
    for times in (2, 1):
        for _ in range(times):
            recorder.record(JOB, EVENT)
        await recorder.flush(60)
    assert api.counts == [4]
    api.objects.clear()
    recorder.record(JOB, EVENT)
    await recorder.flush(60)
    assert api.counts == [1], "the server has forgotten it"


@pytest.mark.parametrize("error", [ApiError("POST", 403, "Forbidden", "quota"), ApiUnreachableError("away")])
async def test_event_that_cannot_be_written_is_counted_and_holds_up_no_other(api: Any, error: Exception) -> None:
    dropped: list[int] = []
    recorder = EventRecorder(api, "test", dropped=lambda: dropped.append(1))
    api.fail["create"] = [error]
    recorder.record(JOB, EVENT)
    recorder.record(JOB, Emit("Normal", Reason.COMPLETED, "done"))
    await recorder.flush(60)
    assert ([item["reason"] for item in api.objects.values()], dropped) == (["Completed"], [1])


async def test_what_finds_the_line_full_is_left_out_and_counted(api: Any) -> None:
    dropped: list[int] = []
    recorder = EventRecorder(api, "test", most_waiting=2, dropped=lambda: dropped.append(1))
    for number in range(5):
        recorder.record(JOB, Emit("Normal", Reason.FINDING, str(number)))
    recorder.record(JOB, Emit("Normal", Reason.FINDING, "0"))
    assert (recorder.num_waiting, len(dropped)) == (2, 3)
    await recorder.flush(60)
    assert api.counts == [2, 1]


async def test_events_are_written_as_they_come(api: Any) -> None:
    recorder = EventRecorder(api, "test")
    writing = asyncio.create_task(recorder.run())
    for number in range(2):
        api.written.clear()
        recorder.record(JOB, Emit("Normal", Reason.FINDING, str(number)))
        await api.written.wait()
    writing.cancel()
    assert api.counts == [1, 1]


async def test_flush_ends_in_time_although_the_server_does_not_answer(api: Any) -> None:
    class Silent(EventApi):
        async def create(self, *arguments: Any) -> Any:
            await asyncio.Event().wait()

    silent: Any = Silent()
    recorder = EventRecorder(silent, "test")
    recorder.record(JOB, EVENT)
    await recorder.flush(0.01)
