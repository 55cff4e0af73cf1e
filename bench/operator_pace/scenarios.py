"""What is done to the operator, one after the other on one control plane."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.operator_pace.client import BATCH_JOBS, CONFIG_MAPS, JOBS, Client, Document
from bench.operator_pace.measuring import Meter, bound_of, cpu_seconds, histogram, num_series, percentile, rss_mb
from bench.operator_pace.plane import MeasuredPlane
from bench.operator_pace.playing import Player
from bench.operator_pace.report import table
from bench.operator_pace.timeline import MOMENTS, Timeline
from tests.integration.operator_process import OperatorProcess

CONCURRENT = 20
"""Creations of the harness under way at a time."""
Results = dict[str, Any]
TARGET_RATE, TARGET_FLOOR_SECONDS = 20.0, 4.3
"""Newcomers a second, on a machine on which the floor of 1,000 jobs takes so long."""


def manifest(name: str) -> Document:
    """A small valid job."""
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": "pvc://models/base"},
            "data": {"source": "pvc://data/train.jsonl"},
            "training": {"maxSteps": 4, "globalBatchSize": 4},
            "workspace": {"claimName": "workspace"},
            "output": {"destination": f"pvc://results/{name}"},
        },
    }


async def in_parallel(number: int, work: Callable[[int], Awaitable[Any]], concurrent: int = CONCURRENT) -> None:
    """Do the work for 0 to number - 1, so many at a time, in that order."""
    numbers = iter(range(number))

    async def one() -> None:
        for place in numbers:
            await work(place)

    await asyncio.gather(*(one() for _ in range(concurrent)))


@dataclass
class Stage:
    """The cluster, the operator, and what was found so far."""

    plane: MeasuredPlane
    client: Client
    operator: OperatorProcess
    num_jobs: int
    patience: float
    """Seconds for anything that all jobs have to reach."""
    is_restarting: bool = False
    """Whether the harness has ended the operator."""
    results: Results = field(default_factory=dict)

    def record(self, name: str, figures: Results) -> None:
        """Keep and print what a scenario has found: at once, so that a later one that fails does not take it along."""
        self.results[name] = figures
        print(table({name: figures}, self.num_jobs), flush=True)

    @property
    def pid(self) -> int:
        """Of the operator that runs now."""
        return self.operator.process.pid

    @asynccontextmanager
    async def namespace(self, name: str, *, pending: bool = False) -> AsyncIterator[tuple[Timeline, Player]]:
        """A namespace with its claims, watched, and with somebody who plays its Jobs."""
        self.plane.make_namespace(name)
        player = Player(self.client, name, pending=pending)
        timeline = Timeline(self.client, name, player.take)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(timeline.run()), group.create_task(player.run())]
            try:
                yield timeline, player
            finally:
                for task in tasks:
                    task.cancel()

    async def submit(self, namespace: str, timeline: Timeline, name: str) -> None:
        """Create one job."""
        # Its first event may be here before the answer, so the life begins with the request.
        timeline.created(name)
        await self.client.create(JOBS.format(namespace), manifest(name))


async def floor(stage: Stage) -> None:
    """The same API server without an operator: status, ConfigMap and Job of one life, as often."""
    timeline: Timeline
    async with stage.namespace("model-life") as (timeline, _):
        await stage.submit("model-life", timeline, "one")
        await timeline.reached("first_child", ["one"], stage.patience)
    batch_job = await first(stage.client, BATCH_JOBS, "model-life")
    config_map = await first(stage.client, CONFIG_MAPS, "model-life", but="kube-root-ca.crt")
    status = (await first(stage.client, JOBS, "model-life"))["status"]
    stage.is_restarting = True
    stage.operator.terminate()
    stage.plane.make_namespace("floor")
    await in_parallel(stage.num_jobs, lambda number: stage.client.create(JOBS.format("floor"), manifest(f"job-{number}")))
    begun, cpu = time.monotonic(), cpu_seconds(stage.plane.api_server.process.pid)

    async def write(number: int) -> None:
        await stage.client.patch_status(JOBS.format("floor"), f"job-{number}", status)
        await stage.client.create(CONFIG_MAPS.format("floor"), renamed(config_map, f"plan-{number}"))
        await stage.client.create(BATCH_JOBS.format("floor"), renamed(batch_job, f"job-{number}"))

    await in_parallel(stage.num_jobs, write)
    stage.record(
        "floor",
        {"seconds": time.monotonic() - begun, "api_server_cpu_seconds": cpu_seconds(stage.plane.api_server.process.pid) - cpu},
    )
    for collection in (JOBS, BATCH_JOBS, CONFIG_MAPS):
        await stage.client.delete_all(collection.format("floor"))
    await stage.client.delete_all(JOBS.format("model-life"))
    stage.operator.start()
    stage.is_restarting = False
    await ready(stage)


class OperatorDiedError(Exception):
    """The operator ended by itself."""


async def died(stage: Stage) -> None:
    """Watch that the operator runs. Raises OperatorDiedError with the end of its log; restarts of the harness are no death."""
    while True:
        await asyncio.sleep(1.0)
        code = None if stage.is_restarting else stage.operator.process.poll()
        if code is not None:
            end = "\n".join(stage.operator.log.read_text().splitlines()[-5:])
            raise OperatorDiedError(f"the operator ended with {code}:\n{end}")


async def first(client: Client, collection: str, namespace: str, but: str = "") -> Document:
    """The first object of a collection."""
    items = (await client.request("GET", collection.format(namespace)))["items"]
    return next(item for item in items if item["metadata"]["name"] != but)


def renamed(document: Document, name: str) -> Document:
    """The same object under another name, its owner and what the server set left out, and not selected by any operator."""
    document = {key: value for key, value in document.items() if key != "status"}
    document["metadata"] = {"name": name, "annotations": document["metadata"].get("annotations") or {}}
    if document.get("spec"):
        document["spec"] = {key: value for key, value in document["spec"].items() if key not in ("selector", "manualSelector")}
        template = document["spec"]["template"]
        document["spec"]["template"] = template | {"metadata": {"annotations": template["metadata"].get("annotations") or {}}}
    return document


async def ready(stage: Stage) -> float:
    """Wait until the operator has everything in its cache. Returns the seconds."""
    begun = time.monotonic()
    await asyncio.to_thread(stage.operator.wait_for_line, "ready")
    return time.monotonic() - begun


async def burst(stage: Stage) -> None:
    """All jobs at once, then their pods run and end."""
    names = [f"job-{number}" for number in range(stage.num_jobs)]
    async with stage.namespace("burst") as (timeline, player):
        meter, lag = Meter(stage.operator, stage.plane.audit_log), histogram(stage.operator, "finetune_loop_lag_seconds")
        begun = time.monotonic()
        await in_parallel(len(names), lambda number: stage.submit("burst", timeline, names[number]))
        created = time.monotonic() - begun
        await timeline.reached("first_child", names, stage.patience)
        all_begun = time.monotonic() - begun
        to_first_child = meter.read()
        meter.restart()
        player.curtain.set()
        await timeline.reached("succeeded", names, stage.patience)
        all_done = time.monotonic() - begun
        await asyncio.sleep(2)
        rest = meter.read()
        of_jobs, others = num_series(stage.operator)
        lags = histogram(stage.operator, "finetune_loop_lag_seconds")
    number = len(names)
    calls = to_first_child.calls + rest.calls
    lives = timeline.lives.values()
    children = sum(count for call, count in calls.items() if call in CHILD_CREATES)
    transitions = sum(life.num_transitions for life in lives)
    floor_seconds = stage.results.get("floor", {}).get("seconds", math.nan)
    stage.record(
        "burst",
        {
            "all_created_seconds": created,
            "all_first_children_seconds": all_begun,
            "all_succeeded_seconds": all_done,
            **{
                moment: {"p50": percentile(timeline.seconds(moment), 0.5), "p99": percentile(timeline.seconds(moment), 0.99)}
                for moment in MOMENTS
            },
            "first_child_in_floors": {
                "p50": percentile(timeline.seconds("first_child"), 0.5) / floor_seconds,
                "p99": percentile(timeline.seconds("first_child"), 0.99) / floor_seconds,
            },
            "cpu_ms_to_first_child": to_first_child.cpu_seconds / number * 1e3,
            "cpu_ms_per_life": (to_first_child.cpu_seconds + rest.cpu_seconds) / number * 1e3,
            "cpu_in_floors": (to_first_child.cpu_seconds + rest.cpu_seconds) / floor_seconds,
            "writes_to_first_child": to_first_child.num_writes / number,
            "writes_per_life": (to_first_child.num_writes + rest.num_writes) / number,
            "transitions_per_life": transitions / number,
            "writes_over_children_and_transitions": (to_first_child.num_writes + rest.num_writes - children - transitions)
            / number,
            "status_writes_per_life": calls["patch finetunejobs/status"] / number,
            "children_per_life": children / number,
            "calls_per_life": {call: count / number for call, count in sorted(calls.items())},
            "loop_lag_p99_seconds": bound_of(lags, lag, 0.99),
            "loop_lag_most_seconds": bound_of(lags, lag, 1.0),
            "rss_mb": rss_mb(stage.pid),
            "series_per_job": of_jobs / number,
            "series_of_no_job": others,
        },
    )


CHILD_CREATES = ("create configmaps", "create services", "create jobs")


async def restart(stage: Stage) -> None:
    """Kill the operator and start it on all that is there."""
    stage.is_restarting = True
    stage.operator.kill()
    stage.operator.start()
    stage.is_restarting = False
    seconds = await ready(stage)
    await asyncio.sleep(5)
    floor_seconds = stage.results.get("floor", {}).get("seconds", math.nan)
    stage.record("restart", {"ready_seconds": seconds, "ready_in_floors": seconds / floor_seconds, "rss_mb": rss_mb(stage.pid)})


def rate_of(stage: Stage) -> float:
    """The target's rate, lower on a machine that is slower than the target's; that rate itself if the floor is unknown."""
    seconds = stage.results.get("floor", {}).get("seconds", 0.0) / stage.num_jobs * 1000
    return TARGET_RATE * min(1.0, TARGET_FLOOR_SECONDS / seconds) if seconds else TARGET_RATE


async def pending(stage: Stage, num_pending: int, idle_seconds: float, steady_seconds: float, rate: float | None) -> None:
    """So many jobs whose pods find no room: first nothing else happens, then others arrive at a steady rate."""
    rate = rate or rate_of(stage)
    names = [f"waiting-{number}" for number in range(num_pending)]
    async with stage.namespace("pending", pending=True) as (timeline, player):
        player.curtain.set()
        await in_parallel(len(names), lambda number: stage.submit("pending", timeline, names[number]))
        await timeline.reached("first_child", names, stage.patience)
        await player.played(num_pending)
        # Until what the pods' first minute brings has been written.
        await asyncio.sleep(min(idle_seconds, 60.0))
        meter = Meter(stage.operator, stage.plane.audit_log)
        await asyncio.sleep(idle_seconds)
        use = meter.read()
        stage.record(
            "pending",
            {
                "seconds": use.seconds,
                "requests_per_second": use.calls.total() / use.seconds,
                "core_percent": use.cpu_seconds / use.seconds * 100,
                "calls": dict(sorted(use.calls.items())),
                "rss_mb": rss_mb(stage.pid),
            },
        )
        await steady(stage, timeline, steady_seconds, rate)
        await player.played(num_pending + int(rate * steady_seconds))
    # Nobody watches or plays now: it would fail with the API server. The jobs wait on.
    await bounce(stage)


async def steady(stage: Stage, timeline: Timeline, seconds: float, rate: float) -> None:
    """Newcomers at a rate while the others wait."""
    names = [f"steady-{number}" for number in range(int(rate * seconds))]
    loop = asyncio.get_running_loop()
    begun = loop.time()
    tasks = []
    for number, name in enumerate(names):
        await asyncio.sleep(max(begun + number / rate - loop.time(), 0.0))
        tasks.append(asyncio.create_task(stage.submit("pending", timeline, name)))
    await asyncio.gather(*tasks)
    await timeline.reached("first_child", names, stage.patience)
    stage.record("steady", {"rate": rate, **spread(timeline, names, ("accepted", "first_child"))})


def spread(timeline: Timeline, names: Iterable[str], moments: Iterable[str]) -> Results:
    """p50 and p99 of these moments."""
    listed = list(names)
    return {
        moment: {
            "p50": percentile(timeline.seconds(moment, listed), 0.5),
            "p99": percentile(timeline.seconds(moment, listed), 0.99),
        }
        for moment in moments
    }


async def bounce(stage: Stage) -> None:
    """The API server dies and comes back; the operator must not die with it, and continues."""
    pid = stage.pid
    away = await asyncio.to_thread(stage.plane.bounce_api_server)
    begun = time.monotonic()
    async with stage.namespace("after-bounce") as (timeline, _):
        await stage.submit("after-bounce", timeline, "first")
        await timeline.reached("first_child", ["first"], stage.patience)
    stage.record(
        "bounce",
        {
            "away_seconds": away,
            "first_child_after_seconds": time.monotonic() - begun,
            "operator_survived": stage.operator.process.poll() is None and stage.pid == pid,
        },
    )
