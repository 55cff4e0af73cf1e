"""The operator dies a hundred times, at any of its requests, and jobs are deleted: what Prometheus adds up is what pods held, to
a minute for each pod.

The truth is written down by a witness who sees every change of the server, and knows nothing of statuses.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from finetune_cli.local.launch import free_port
from finetune_job.failures import FailureClass
from finetune_operator.client.kinds import JOBS, PODS
from finetune_operator.metrics.job_metrics import JobCollector
from tests.simulation.api_server import Change, Document
from tests.simulation.controllers import is_over, is_true, phase_of
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import LAB, TEAM, World, a_manifest, role_of
from tests.support.documented import as_written, blocks_of
from tests.support.prometheus import Prometheus, running_prometheus

KILLS = 100
SCRAPE_SECONDS = 15.0
GPUS_PER_POD = 4
MINUTE = 60.0
METRICS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"
FAULTS = (FailureClass.INTERNAL, FailureClass.COLLECTIVE, FailureClass.NON_FINITE, FailureClass.PREEMPTED)
Held = dict[str, list[float]]
"""UID of a training pod -> since when, and until when, it has had a node."""


@dataclass
class Witness:
    """What happened."""

    world: World
    held: dict[str, Held] = field(default_factory=dict)
    """UID of a job -> what its pods held."""
    deleted_jobs: int = 0
    sums_compared: int = 0

    def saw(self, change: Change) -> None:
        now = self.world.loop.time()
        if change.kind == PODS:
            self._pod(change, now)
        elif change.kind == JOBS and change.after is None:
            self.deleted_jobs += 1
            # The job is gone, and with it whoever could be charged.
            for held in self.held.get((change.before or {})["metadata"]["uid"], {}).values():
                _until(held, now)
        elif change.kind == JOBS and change.after is not None:
            self._compare_sums(change.after.get("status") or {})

    def _pod(self, change: Change, now: float) -> None:
        pod = change.after or change.before or {}
        if role_of(pod) != "train":
            return
        pods = self.held.setdefault(pod["metadata"]["labels"]["finetune.dev/job-uid"], {})
        uid = pod["metadata"]["uid"]
        if pod["spec"].get("nodeName") and uid not in pods:
            pods[uid] = [now]
        if uid in pods and (change.after is None or is_over(pod)):
            _until(pods[uid], now)

    def _compare_sums(self, status: Document) -> None:
        attempts = [each["gpuSeconds"] for each in status.get("attempts") or () if "gpuSeconds" in each]
        total = status.get("gpuSeconds")
        if total is not None and len(status["attempts"]) < 64:
            self.sums_compared += 1
            # A gang that waits for its last pod has no record yet. If the job ends then, only the total has what its pods held.
            current = status.get("attempt", 0)
            has_record = any((each["role"], each["number"]) == ("train", current) for each in status["attempts"])
            for outcome in ("waiting", "productive", "lost"):
                assert total[outcome] >= sum(each[outcome] for each in attempts), status
                is_exact = outcome == "productive" or (outcome == "lost" and has_record)
                assert not is_exact or total[outcome] == sum(each[outcome] for each in attempts), status

    def gpu_seconds(self, job: str) -> float:
        return GPUS_PER_POD * sum(until - since for since, until in self.held[job].values())


def _until(held: list[float], now: float) -> None:
    if len(held) == 1:
        held.append(now)


@dataclass
class Recording:
    """What Prometheus would have scraped, as OpenMetrics text with times. Some scrapes are missed."""

    world: World
    rng: random.Random
    samples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return self.world.loop.now().timestamp()

    def scrape(self) -> None:
        process = self.world.running_operator()
        if process is None or not process.is_synced or self.rng.random() < 0.1:
            return
        registry = CollectorRegistry()
        registry.register(JobCollector(process.cache, self.world.loop.now))
        for family in registry.collect():
            if family.name == "finetune_job_gpu_seconds":
                for sample in family.samples:
                    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                    series = f"{sample.name}{{{labels}}}"
                    self.samples.setdefault(series, []).append(f"{series} {sample.value} {self.now}")

    @property
    def text(self) -> str:
        lines = [line for samples in self.samples.values() for line in samples]
        return "\n".join(("# TYPE finetune_job_gpu_seconds gauge", *lines, "# EOF\n"))


async def _live(world: World, recording: Recording, rng: random.Random, numbers: Iterator[int]) -> None:
    """Jobs run, fail, end and are deleted until the operator has died often enough."""
    world.weather.deaths, world.weather.faults = 0.02, 0.05
    while world.num_lives <= KILLS:
        for _ in range(int(SCRAPE_SECONDS)):
            if world.operator is None or not world.operator.is_alive:
                world.start_operator()
            world.cluster_works()
            if process := world.running_operator():
                process.deliver_all()
            await asyncio.sleep(1.0)
        recording.scrape()
        world.admit_all()
        jobs = world.server.all(JOBS)
        if len(jobs) < 4:
            number = next(numbers)
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
            if chance < (0.5 if is_true(job, "Finished") else 0.004):
                world.remove_job(job, rng.choice(["Background", "Foreground"]))
            elif chance < 0.006:
                world.edit_run(job, cancel=True)
            elif is_true(job, "Stalled") and chance < 0.5:
                world.edit_run(job, retry=job["spec"].get("run", {}).get("retry", 0) + 1)
            elif chance < 0.1:
                world.tell_progress(job, rng.randrange(1, 10))
        world.check()


async def _story(world: World, recording: Recording, rng: random.Random) -> None:
    world.start_operator()
    world.invariants.counted_faults = True
    await _live(world, recording, rng, itertools.count(1))
    for job in world.server.all(JOBS):
        if not is_true(job, "Finished"):
            world.edit_run(job, cancel=True)
    world.weather.deaths = world.weather.faults = 0.0
    for _ in range(20):
        await world.rest(1, succeed=False)
        recording.scrape()


def test_hours_add_up_over_a_hundred_deaths_of_the_operator_and_deletions_of_jobs(tmp_path: Path) -> None:
    loop = VirtualLoop()
    world = World(loop, random.Random("counters"))
    witness, recording = Witness(world), Recording(world, random.Random("scrapes"))
    world.server.watchers.append(witness.saw)
    profile: dict[str, Any] = {"gpu": {"memory": "80Gi", "pricePerHour": "2.50"}}
    world.people_prepare([], profile)
    begin = recording.now - 3600.0
    run(_story(world, recording, random.Random("story")), loop)
    assert world.num_lives > KILLS
    with running_prometheus(tmp_path / "prometheus", free_port(), [], {"groups": []}, recording.text) as prometheus:
        _compare(prometheus, witness, begin, recording.now)


def _compare(prometheus: Prometheus, witness: Witness, begin: float, end: float) -> None:
    def billed(*labels: str) -> Counter[tuple[str, ...]]:
        (documented,) = blocks_of(METRICS_PAGE, "promql")
        query = as_written(documented, {"(team, outcome)": f"({','.join(labels)})", "30d": f"{end - begin:.0f}s"})
        found = prometheus.query(query, end)
        return Counter({tuple(each["metric"][label] for label in labels): 3600 * float(each["value"][1]) for each in found})

    by_job = billed("uid")
    errors = {
        uid: (by_job[uid,] - witness.gpu_seconds(uid)) / GPUS_PER_POD / len(held) for uid, held in witness.held.items() if held
    }
    total, truth = sum(by_job.values()), sum(map(witness.gpu_seconds, witness.held))
    outcomes = billed("outcome")
    pods = sum(map(len, witness.held.values()))
    print(f"{witness.deleted_jobs} jobs deleted, {pods} pods, {total:.0f} of {truth:.0f} GPU seconds")
    print(f"{dict(outcomes)}; errors for each pod from {min(errors.values()):.1f} to {max(errors.values()):.1f} s")
    assert witness.deleted_jobs > 20
    assert witness.sums_compared > 100
    # A pod may take a minute to end after its attempt was closed, and a deleted job was last seen a scrape before that.
    assert all(-MINUTE - SCRAPE_SECONDS < error < MINUTE for error in errors.values()), errors
    # The pods hold their GPUs for minutes, so that half an interval between scrapes at each end is some per cent.
    assert abs(total - truth) < 0.05 * truth
    assert min(outcomes["productive",], outcomes["lost",]) > 0
