"""Jobs are started one after the other, each only once it is known what became of the start before it."""

import asyncio
from typing import Any

import pytest

from finetune_job.api.status import Condition, PlanStatus
from finetune_job.conditions import ConditionType
from finetune_operator.client.answers import ApiUnreachableError
from finetune_operator.client.kinds import JOBS, PROFILES, JobKey
from finetune_operator.decide.actions import Actions
from finetune_operator.passes.execute import PassOutcome, starts
from finetune_operator.passes.gather import Gathered
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.cache.test_waiting_line import profile
from tests.unit.finetune_operator.passes.test_execute import NOW, STATUS, Scene, scene

FREEZE = Actions(
    status=STATUS.model_copy(update={"start_time": "2026-01-02T03:05:00Z", "plan": PlanStatus(hash="h", trainer_image="i")})
)


def named(name: str, created: str, **more: Any) -> dict[str, Any]:
    document = objects.finetune_job(uid=f"{name}-uid", **more)
    document["metadata"] |= {"name": name, "creationTimestamp": created}
    return document


IS_STALLED = {"type": "Stalled", "status": "True", "reason": "Refused", "lastTransitionTime": objects.CREATED}
STALLED = named("stalled", "2025-01-02T03:04:05Z", status={"conditions": [IS_STALLED]})
"""An older job that sees the same free place once it is stalled no longer."""


class Line:
    """One place, and the job of the scene."""

    def __init__(self) -> None:
        self.stage: Scene = scene()
        self.stage.cache.take(PROFILES, profile(1))
        self.turns: list[JobKey] = []
        self.stage.cache.lines.turn_has_come = self.turns.append

    async def execute(self, gathered: Gathered, actions: Actions = FREEZE) -> PassOutcome:
        return await self.stage.executor.execute(gathered, actions)


@pytest.fixture
def line() -> Line:
    return Line()


async def test_of_two_jobs_that_see_the_same_place_one_is_started(line: Line) -> None:
    line.stage.cache.take(JOBS, line.stage.api.put(JOBS, STALLED))
    second = await line.stage.gatherer.gather(JobKey("team", "stalled"), NOW)
    first = await line.stage.gathered()
    assert first.observed.line == second.observed.line
    outcomes = await asyncio.gather(line.execute(first), line.execute(second))
    assert outcomes == [PassOutcome.ACTED, PassOutcome.OUTDATED]
    assert line.stage.writes() == [("patch", "FineTuneJob")]


@pytest.mark.parametrize("is_carried_out", [False, True])
async def test_next_job_is_started_once_it_is_known_what_became_of_a_start_without_an_answer(
    line: Line, is_carried_out: bool
) -> None:
    line.stage.cache.take(JOBS, line.stage.api.put(JOBS, STALLED))
    second = await line.stage.gatherer.gather(JobKey("team", "stalled"), NOW)
    line.stage.api.fail["patch"] = [ApiUnreachableError("reset")]
    with pytest.raises(ApiUnreachableError):
        await line.execute(await line.stage.gathered())
    if is_carried_out:
        line.stage.api.put(JOBS, objects.finetune_job(status={"startTime": objects.CREATED, "plan": {"hash": "h"}}))
    line.stage.api.fail["get"] = [ApiUnreachableError("reset")]
    with pytest.raises(ApiUnreachableError):
        await line.execute(second)
    assert await line.execute(second) is (PassOutcome.OUTDATED if is_carried_out else PassOutcome.ACTED)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_write_that_frees_the_place_wakes_the_job_whose_turn_comes_by_it(line: Line, ends: bool) -> None:
    """No watch tells of it: the echo of an own write is known already."""
    await line.execute(await line.stage.gathered())
    line.stage.cache.take(JOBS, line.stage.api.put(JOBS, named("next", "2026-02-02T03:04:05Z")))
    gathered = await line.stage.gathered()
    kind = ConditionType.FINISHED if ends else ConditionType.READY
    conditions = (Condition(type=kind, status="True", reason="Known", last_transition_time=objects.CREATED),)
    status = gathered.observed.job.status.model_copy(update={"conditions": conditions})
    await line.execute(gathered, Actions(status=status))
    assert line.turns == ([JobKey("team", "next")] if ends else [])


async def test_only_the_write_that_freezes_the_plan_starts_a_job(line: Line) -> None:
    job = (await line.stage.gathered()).observed.job
    assert starts(job, FREEZE)
    assert not starts(job, Actions())
    assert not starts(job, Actions(status=STATUS))
    await line.execute(await line.stage.gathered())
    assert not starts((await line.stage.gathered()).observed.job, FREEZE)
