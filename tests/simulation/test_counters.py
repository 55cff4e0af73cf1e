"""The operator dies a hundred times, at any of its requests, and jobs are deleted: what Prometheus adds up is what happened.

The truth is written down by a witness who sees every change of the server, and knows nothing of accounts.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from finetune_job.failures import FailureClass
from finetune_operator.cluster.kinds import JOBS, PODS
from finetune_operator.usage_metrics import UsageCollector
from tests.simulation.api_server import Change, Document
from tests.simulation.controllers import is_over, is_true, phase_of
from tests.simulation.invariants import ATTEMPT_FIELDS
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import LAB, TEAM, World, a_manifest, role_of

KILLS = 100
SCRAPE_SECONDS = 15.0
GPUS_PER_POD = 4
Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass
class Witness:
    """What happened."""

    world: World
    ended: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    restarts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    held: dict[str, list[float]] = field(default_factory=dict)
    """UID of a training pod -> since when, and until when, it has had a node."""
    deleted_jobs: int = 0
    started: int = 0
    """Of those that ended."""
    stepped: int = 0
    """Of those that ended: who had made a step."""

    def saw(self, change: Change) -> None:
        now = self.world.loop.time()
        if change.kind == PODS:
            self._pod(change, now)
        elif change.kind == JOBS and change.after is None:
            self.deleted_jobs += 1
            (namespace, name) = (change.before or {})["metadata"]["namespace"], (change.before or {})["metadata"]["name"]
            # The job is gone, and with it whoever could be charged.
            for pod in self.world.server.all(PODS, namespace):
                if pod["metadata"]["labels"].get("finetune.dev/job") == name and pod["metadata"]["uid"] in self.held:
                    self._until(pod["metadata"]["uid"], now)
        elif change.kind == JOBS and change.after is not None:
            self._job((change.before or {}).get("status") or {}, change.after)

    def _pod(self, change: Change, now: float) -> None:
        pod = change.after or change.before or {}
        if role_of(pod) != "train":
            return
        uid = pod["metadata"]["uid"]
        if pod["spec"].get("nodeName") and uid not in self.held:
            self.held[uid] = [now]
        if uid in self.held and (change.after is None or is_over(pod)):
            self._until(uid, now)

    def _until(self, uid: str, now: float) -> None:
        if len(self.held[uid]) == 1:
            self.held[uid].append(now)

    def _job(self, before: Document, job: Document) -> None:
        after, namespace = job.get("status") or {}, job["metadata"]["namespace"]
        old, new = _condition(before, "Succeeded"), _condition(after, "Succeeded")
        if old.get("status", "Unknown") == "Unknown" != new.get("status", "Unknown"):
            result = "Succeeded" if new["status"] == "True" else "Cancelled" if new["reason"] == "Cancelled" else "Failed"
            self.ended[namespace, result, new["reason"]] += 1
            # One that is cancelled before its start has no phases.
            self.started += "startTime" in after
            self.stepped += "firstStepTime" in (after.get("progress") or {})
        for role, name in ATTEMPT_FIELDS.items():
            number = before.get(name, 0)
            if after.get(name, 0) == number + 1:
                was, record = _record(before, role, number), _record(after, role, number)
                if record.get("outcome") == "Failed" and was.get("outcome", "Running") == "Running":
                    counted = "true" if record.get("counted") else "false"
                    self.restarts[namespace, record["failure"], counted] += 1

    @property
    def gpu_seconds(self) -> float:
        return GPUS_PER_POD * sum(until - since for since, until in self.held.values())


def _condition(status: Document, kind: str) -> Document:
    return next((one for one in status.get("conditions") or () if one["type"] == kind), {})


def _record(status: Document, role: str, number: int) -> Document:
    found = [one for one in status.get("attempts") or () if (one.get("role", "train"), one["number"]) == (role, number)]
    return found[-1] if found else {}


@dataclass
class Prometheus:
    """Adds up increases as PromQL does: the first value of a series is no increase, and a lower one is a new beginning."""

    latest: dict[Series, float] = field(default_factory=dict)
    increase: Counter[Series] = field(default_factory=Counter)
    resets: int = 0

    def scrape(self, world: World) -> None:
        process = world.running_operator()
        if process is None:
            return
        registry = CollectorRegistry()
        registry.register(UsageCollector(process.accounts.totals))
        for family in registry.collect():
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                before = self.latest.get(key)
                if before is not None:
                    self.resets += sample.value < before
                    self.increase[key] += sample.value - (before if sample.value >= before else 0.0)
                self.latest[key] = sample.value

    def by(self, name: str, *labels: str) -> Counter[tuple[str, ...]]:
        found: Counter[tuple[str, ...]] = Counter()
        for (metric, pairs), value in self.increase.items():
            if metric == name and value:
                found[tuple(dict(pairs)[label] for label in labels)] += value
        return found


FAULTS = (FailureClass.INTERNAL, FailureClass.COLLECTIVE, FailureClass.NON_FINITE, FailureClass.PREEMPTED)


async def _live(world: World, prometheus: Prometheus, rng: random.Random) -> None:
    """Jobs run, fail, end and are deleted until the operator has died often enough."""
    number = 0
    while world.num_lives <= KILLS:
        for _ in range(int(SCRAPE_SECONDS)):
            if world.operator is None or not world.operator.is_alive:
                world.start_operator()
            world.cluster_works()
            if process := world.running_operator():
                process.deliver_all()
            await asyncio.sleep(1.0)
        prometheus.scrape(world)
        world.admit_all()
        jobs = world.server.all(JOBS)
        if len(jobs) < 4:
            number += 1
            space = rng.choice([TEAM, LAB])
            manifest = a_manifest(space, f"tune-{number}", nodes=rng.choice([1, 2, 3]), queueName="gpus", maxRestarts=1)
            manifest["spec"]["parallelism"]["processesPerNode"] = GPUS_PER_POD
            manifest["spec"]["training"]["globalBatchSize"] = 48
            world.manifests[space, f"tune-{number}"] = manifest
            world.restore_claims(space)
            world.apply(space, f"tune-{number}")
        for job in world.batch_jobs_running():
            if rng.random() < (0.02 if role_of(job) == "train" else 0.5):
                world.succeed(job)
        for pod in world.nodes.running(lambda pod: role_of(pod) == "train"):
            if phase_of(pod) == "Running" and rng.random() < 0.008:
                world.nodes.end(pod, rng.choice(FAULTS))
        for job in jobs:
            chance = rng.random()
            if chance < (0.1 if is_true(job, "Finished") else 0.004):
                world.remove_job(job, rng.choice(["Background", "Foreground"]))
            elif chance < 0.006:
                world.edit_run(job, cancel=True)
            elif is_true(job, "Stalled") and chance < 0.5:
                world.edit_run(job, retry=job["spec"].get("run", {}).get("retry", 0) + 1)
            elif chance < 0.1:
                world.tell_progress(job, rng.randrange(1, 10))
        world.check()


async def _story(world: World, prometheus: Prometheus, rng: random.Random) -> None:
    world.start_operator()
    world.invariants.counted_faults = True
    world.weather.deaths, world.weather.faults = 0.015, 0.05
    await _live(world, prometheus, rng)
    world.weather.deaths = world.weather.faults = 0.0
    for job in world.server.all(JOBS):
        if not is_true(job, "Finished"):
            world.edit_run(job, cancel=True)
    for _ in range(20):
        await world.rest(1, succeed=False)
        prometheus.scrape(world)


def test_increases_add_up_over_a_hundred_deaths_of_the_operator_and_deletions_of_jobs() -> None:
    loop, prometheus = VirtualLoop(), Prometheus()
    world = World(loop, random.Random("counters"))
    witness = Witness(world)
    world.server.watchers.append(witness.saw)
    profile: dict[str, Any] = {"gpu": {"memory": "80Gi", "pricePerHour": "2.50"}}
    world.people_prepare([], profile)
    run(_story(world, prometheus, random.Random("story")), loop)

    found = prometheus.by("finetune_gpu_seconds_total", "outcome")
    total = sum(found.values())
    print(
        f"{world.num_lives} lives, {witness.deleted_jobs} jobs deleted, {sum(witness.ended.values())} ended, "
        f"{sum(witness.restarts.values())} restarts, {len(witness.held)} pods, "
        f"{total:.0f} of {witness.gpu_seconds:.0f} GPU seconds ({dict(found)})"
    )
    assert world.num_lives > KILLS
    assert witness.deleted_jobs > 20
    assert len(witness.restarts) > 3
    assert len(witness.ended) > 4
    assert prometheus.resets == 0
    assert prometheus.by("finetune_jobs_total", "namespace", "result", "reason") == witness.ended
    assert prometheus.by("finetune_restarts_total", "namespace", "class", "counted") == witness.restarts
    assert abs(total - witness.gpu_seconds) < 0.01 * witness.gpu_seconds
    cost = sum(prometheus.by("finetune_cost_total", "team").values())
    assert abs(cost - total / 3600 * 2.5) < 1e-6 * cost
    (phases,) = {
        value for (phase,), value in prometheus.by("finetune_phase_duration_seconds_count", "phase").items() if phase == "pending"
    }
    assert phases == witness.started, "each job's phases are observed once"
    assert 0 < witness.stepped < witness.started
    assert sum(prometheus.by("finetune_time_to_first_step_seconds_count", "queue").values()) == witness.stepped
