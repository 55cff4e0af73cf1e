"""A job whose usage is counted, and the operator's parts that count it, with a server in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.conditions import initial_conditions, with_condition
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.cluster.accounts import Accounts
from finetune_operator.cluster.cache import Cache
from finetune_operator.cluster.kinds import BATCH_JOBS, JOBS, PODS, PROFILES
from finetune_operator.cluster.projection import project
from finetune_operator.decide.observed import JobView
from finetune_operator.decide.usage_labels import JobLabels
from tests.unit.finetune_operator.cluster import objects
from tests.unit.finetune_operator.cluster.fakes import Clock, FakeApi

BEGUN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STARTED = {"startTime": objects.CREATED}
LABELS = JobLabels("team", "red", "LoRA", "gpus", "default", "H100", "2.5")


def moment(seconds: float) -> str:
    return (BEGUN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Scene:
    """A team's job with one pod of four GPUs, which runs from second 10 on."""

    api: FakeApi = field(default_factory=FakeApi)
    cache: Cache = field(default_factory=lambda: Cache(Clock()))
    now: float = 0.0

    def __post_init__(self) -> None:
        profile = {
            "trainerImage": "x",
            "gpu": {"pricePerHour": "2.5"},
            "nodeSelector": {"nvidia.com/gpu.product": "H100"},
            "pods": {"train": {"queueName": "gpus"}},
        }
        self.take(PROFILES, {"metadata": objects.metadata("default", "profile-uid"), "spec": profile})
        self.show_job(2, STARTED)
        self.take(BATCH_JOBS, objects.batch_job(version=3))
        running = {"name": "trainer", "state": {"running": {"startedAt": moment(10)}}}
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": moment(10)}
        self.take(
            PODS, objects.pod(version=4, status={"phase": "Running", "conditions": [placed], "containerStatuses": [running]})
        )
        self.accounts = self.another_life()

    def another_life(self) -> Accounts:
        fake: Any = self.api
        return Accounts(fake, self.cache, "system", "tuning-accounts", now=lambda: BEGUN + timedelta(seconds=self.now))

    def take(self, kind: Any, document: dict[str, Any]) -> None:
        self.cache.apply(kind, project(kind, document))

    def show_job(self, version: int, status: dict[str, Any]) -> None:
        document = objects.finetune_job(version, status, parallelism={"nodes": 1, "processesPerNode": 4})
        document["metadata"]["labels"] = {"finetune.dev/team": "red"}
        self.take(JOBS, document)

    async def count_until(self, seconds: float) -> None:
        """One round, at that time."""
        self.now = seconds
        task = asyncio.create_task(self.accounts.run())
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        assert not task.done() or task.exception() is None

    def writes(self) -> int:
        return sum(verb in ("create", "replace") for verb, *_ in self.api.calls)


def run(scenario: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario(Scene()))


def job(status: FineTuneJobStatus) -> JobView:
    return JobView("team", "tune", "job-uid", 1, "2", spec=None, status=status)


def status_of(succeeded: bool | None = None, *, finished: bool = False) -> FineTuneJobStatus:
    conditions = initial_conditions(generation=1, now=objects.CREATED)
    for kind, value in ((ConditionType.SUCCEEDED, succeeded), (ConditionType.FINISHED, finished)):
        conditions = with_condition(conditions, kind, value, Reason.COMPLETED, "", generation=1, now=objects.CREATED)
    return FineTuneJobStatus(start_time=objects.CREATED, conditions=conditions)


async def cancel(scene: Scene, number: int, **metadata: Any) -> None:
    """A job that was never started, named and labelled as its user likes, is cancelled."""
    document = objects.finetune_job(1000 + number, profile=f"profile-{number}")
    document["metadata"] |= {"name": f"job-{number}", "uid": f"uid-{number}", **metadata}
    scene.take(JOBS, document)
    namespace = document["metadata"]["namespace"]
    view = JobView(namespace, f"job-{number}", f"uid-{number}", 1, "2", spec=None)
    await scene.accounts.decided(view, status_of(succeeded=False))
