"""When what happened to each job, as watches show it to the harness."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bench.operator_pace.client import BATCH_JOBS, JOBS, Client, Document
from finetune_job.names import LABEL_JOB, LABEL_ROLE, Role

MOMENTS = ("accepted", "first_child", "train_job", "succeeded")
Clock = Callable[[], float]


@dataclass
class Life:
    """Of one job; monotonic seconds."""

    created: float
    moments: dict[str, float] = field(default_factory=dict)
    conditions: dict[str, str] = field(default_factory=dict)
    num_transitions: int = 0
    """How often the status of a condition changed."""
    num_status_writes: int = 0

    def reach(self, moment: str) -> None:
        """Note it the first time."""
        self.moments.setdefault(moment, time.monotonic())


class Timeline:
    """Lives of the jobs of one namespace. `run` watches until it is cancelled."""

    def __init__(self, client: Client, namespace: str, on_batch_job: Callable[[Document], None]) -> None:
        self._client = client
        self._namespace = namespace
        self._on_batch_job = on_batch_job
        self._changed = asyncio.Event()
        self.lives: dict[str, Life] = {}

    def created(self, name: str) -> None:
        """The API server has taken the job."""
        self.lives[name] = Life(time.monotonic())

    async def run(self) -> None:
        """Watch jobs and their children."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_jobs())
            group.create_task(self._watch_batch_jobs())

    async def reached(self, moment: str, names: Iterable[str], seconds: float) -> None:
        """Wait until all of these jobs have reached it. Raises TimeoutError with a count of those that have not."""
        missing = set(names)
        try:
            async with asyncio.timeout(seconds):
                while missing := {name for name in missing if name not in self.lives or moment not in self.lives[name].moments}:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise TimeoutError(f"{len(missing)} jobs have not reached {moment!r}, {min(missing)!r} for one") from error

    def seconds(self, moment: str, names: Iterable[str] | None = None) -> list[float]:
        """From the creation of each job that has reached it."""
        lives = self.lives.values() if names is None else [self.lives[name] for name in names]
        return sorted(life.moments[moment] - life.created for life in lives if moment in life.moments)

    async def _watch_jobs(self) -> None:
        async for event in self._client.watch(JOBS.format(self._namespace)):
            document = event["object"]
            life = self.lives.get(document["metadata"]["name"])
            if life is None or "status" not in document:
                continue
            life.num_status_writes += 1
            now = {item["type"]: item["status"] for item in document["status"].get("conditions", ())}
            life.num_transitions += sum(life.conditions.get(kind, "Unknown") != status for kind, status in now.items())
            life.conditions = now
            if now.get("Validated") == "True":
                life.reach("accepted")
            if now.get("Succeeded") == "True":
                life.reach("succeeded")
            self._changed.set()

    async def _watch_batch_jobs(self) -> None:
        async for event in self._client.watch(BATCH_JOBS.format(self._namespace), metadata_only=True):
            metadata = event["object"]["metadata"]
            labels = metadata.get("labels") or {}
            life = self.lives.get(labels.get(LABEL_JOB, ""))
            if life is None or event["type"] != "ADDED":
                continue
            life.reach("first_child")
            if labels.get(LABEL_ROLE) == Role.TRAIN:
                life.reach("train_job")
            self._on_batch_job(metadata)
            self._changed.set()

    def phases(self) -> Counter[str]:
        """What was reached last, for messages."""
        return Counter(list(life.moments)[-1] if life.moments else "created" for life in self.lives.values())
