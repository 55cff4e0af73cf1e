"""A job counts as active once its start has been sent, unless that came to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from finetune_job.api.status import Condition, PlanStatus
from finetune_job.conditions import ConditionType
from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.execute import PassOutcome, starts
from finetune_operator.cluster.gather import Gathered
from finetune_operator.cluster.kinds import JOBS, PROFILES, JobKey
from finetune_operator.decide.actions import Actions
from tests.unit.finetune_operator.cluster import objects
from tests.unit.finetune_operator.cluster.test_execute import KEY, STATUS, Scene, scene
from tests.unit.finetune_operator.cluster.test_waiting_line import profile

FREEZE = Actions(
    status=STATUS.model_copy(update={"start_time": "2026-01-02T03:05:00Z", "plan": PlanStatus(hash="h", trainer_image="i")})
)


class Line:
    """One place, the job of the scene, and an older one that is stalled."""

    def __init__(self) -> None:
        self.stage: Scene = scene()
        self.stage.cache.take(PROFILES, profile(1))
        other = objects.finetune_job(uid="other-uid", status={"conditions": [{"type": "Stalled", "status": "True"}]})
        other["metadata"] |= {"name": "other", "creationTimestamp": "2025-01-02T03:04:05Z"}
        self.stage.cache.take(JOBS, self.stage.api.put(JOBS, other))
        self.turns: list[JobKey] = []
        self.stage.cache.lines.turn_has_come = self.turns.append

    async def execute(self, gathered: Gathered, actions: Actions = FREEZE) -> PassOutcome:
        return await self.stage.executor.execute(gathered, actions)

    def is_taken(self) -> bool:
        other = self.stage.cache.job_of_uid("other-uid")
        assert other is not None
        return self.stage.cache.lines.ahead_of(other) == 1


def living(scenario: Callable[[Line], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario(Line()))


def test_job_without_a_place_is_not_started_and_observed_again() -> None:
    async def scenario(line: Line) -> None:
        gathered = await line.stage.gathered()
        other = line.stage.cache.job_of_uid("other-uid")
        assert other is not None
        assert line.stage.cache.lines.start(other, 1)
        assert await line.execute(gathered) is PassOutcome.OUTDATED
        assert line.stage.writes() == []
        again = (await line.stage.gathered()).observed.line
        assert again is not None
        assert again.ahead == 1

    living(scenario)


def test_started_job_has_the_place() -> None:
    async def scenario(line: Line) -> None:
        assert await line.execute(await line.stage.gathered()) is PassOutcome.ACTED
        assert line.is_taken()
        held = line.stage.cache.job(KEY)
        assert held is not None
        assert not line.stage.cache.lines.is_starting(held.key.uid)

    living(scenario)


def test_place_is_given_back_if_the_job_had_changed() -> None:
    async def scenario(line: Line) -> None:
        gathered = await line.stage.gathered()
        line.stage.api.put(JOBS, objects.finetune_job(run={"suspend": True}))
        assert await line.execute(gathered) is PassOutcome.OUTDATED
        assert not line.is_taken()

    living(scenario)


@pytest.mark.parametrize(("code", "kept"), [(403, False), (422, False), (500, True), (429, True)])
def test_place_is_given_back_if_the_write_is_refused_and_kept_while_it_may_have_been_carried_out(code: int, kept: bool) -> None:
    async def scenario(line: Line) -> None:
        line.stage.api.fail["patch"] = [ApiError("patch", code, "Reason", "no")]
        with pytest.raises(ApiError):
            await line.execute(await line.stage.gathered())
        assert line.is_taken() == kept

    living(scenario)


@pytest.mark.parametrize("carried_out", [False, True])
def test_lost_answer_is_settled_by_the_next_pass_whatever_it_decides(carried_out: bool) -> None:
    async def scenario(line: Line) -> None:
        line.stage.api.fail["patch"] = [ApiUnreachableError("reset")]
        gathered = await line.stage.gathered()
        with pytest.raises(ApiUnreachableError):
            await line.execute(gathered)
        assert line.is_taken()
        if carried_out:
            line.stage.api.put(JOBS, objects.finetune_job(status={"startTime": objects.CREATED, "plan": {"hash": "h"}}))
        assert await line.execute(await line.stage.gathered(), Actions()) is PassOutcome.OUTDATED
        assert line.is_taken() == carried_out
        assert await line.execute(await line.stage.gathered(), Actions()) is PassOutcome.UNCHANGED

    living(scenario)


def test_lost_answer_is_settled_by_another_try() -> None:
    async def scenario(line: Line) -> None:
        line.stage.api.fail["patch"] = [ApiUnreachableError("reset")]
        with pytest.raises(ApiUnreachableError):
            await line.execute(await line.stage.gathered())
        assert await line.execute(await line.stage.gathered()) is PassOutcome.ACTED
        assert line.is_taken()

    living(scenario)


@pytest.mark.parametrize("ends", [False, True])
def test_a_write_that_frees_the_place_wakes_the_job_whose_turn_comes_by_it(ends: bool) -> None:
    """No watch tells of it: the echo of an own write is known already."""

    async def scenario(line: Line) -> None:
        await line.execute(await line.stage.gathered())
        next_one = objects.finetune_job(uid="next-uid")
        next_one["metadata"] |= {"name": "next", "creationTimestamp": "2026-02-02T03:04:05Z"}
        line.stage.cache.take(JOBS, line.stage.api.put(JOBS, next_one))
        gathered = await line.stage.gathered()
        kind = ConditionType.FINISHED if ends else ConditionType.READY
        conditions = (Condition(type=kind, status="True", reason="Known", last_transition_time=objects.CREATED),)
        status = gathered.observed.job.status.model_copy(update={"conditions": conditions})
        await line.execute(gathered, Actions(status=status))
        assert line.turns == ([JobKey("team", "next")] if ends else [])

    living(scenario)


def test_only_the_write_that_freezes_the_plan_starts_a_job() -> None:
    async def scenario(line: Line) -> None:
        job = (await line.stage.gathered()).observed.job
        assert starts(job, FREEZE)
        assert not starts(job, Actions())
        assert not starts(job, Actions(status=STATUS))
        await line.execute(await line.stage.gathered())
        assert not starts((await line.stage.gathered()).observed.job, FREEZE)

    living(scenario)
