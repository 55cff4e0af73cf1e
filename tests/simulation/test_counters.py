"""The operator dies a hundred times, at any of its requests, and jobs are deleted: what Prometheus adds up is what happened.

The truth is written down by a witness who sees every change of the server, and knows nothing of accounts.
"""

from __future__ import annotations

import asyncio
import copy
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
from finetune_operator.cluster.kinds import JOBS, PODS
from finetune_operator.usage_metrics import UsageCollector
from tests.simulation.api_server import Change, Document
from tests.simulation.controllers import is_over, is_true, phase_of
from tests.simulation.invariants import ATTEMPT_FIELDS
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import LAB, TEAM, World, a_manifest, role_of
from tests.support.documented import as_written, blocks_of
from tests.support.prometheus import Prometheus, running_prometheus

KILLS = 100
SCRAPE_SECONDS = 15.0
GPUS_PER_POD = 4
METRICS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


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
class Recording:
    """What Prometheus would have scraped, as OpenMetrics text with times. Some scrapes are missed."""

    world: World
    rng: random.Random
    lines: list[str] = field(default_factory=list)
    missed_until: float = 0.0

    @property
    def now(self) -> float:
        return self.world.loop.now().timestamp()

    def scrape(self, *, is_last: bool = False) -> None:
        """`is_last`: not missed, since what is asked for at this time is told from its samples."""
        process = self.world.running_operator()
        if process is None or self.now < self.missed_until or (self.rng.random() < 0.1 and not is_last):
            return
        registry = CollectorRegistry()
        registry.register(UsageCollector(process.accounts.totals))
        for family in registry.collect():
            for sample in family.samples:
                # Buckets and sums are not compared.
                if sample.name.endswith(("_total", "_count")):
                    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                    self.lines.append(f"{sample.name}{{{labels}}} {sample.value} {self.now}")


@dataclass
class Counted:
    """Increases between two times, by the documented expression."""

    prometheus: Prometheus
    begin: float
    end: float

    def by(self, name: str, *labels: str) -> Counter[tuple[str, ...]]:
        (documented,) = blocks_of(METRICS_PAGE, "promql")
        wanted = {
            "(team, outcome)": f"({','.join(labels)})",
            "finetune_gpu_seconds_total": name,
            "30d": f"{self.end - self.begin:.0f}s",
        }
        return self._asked(as_written(documented, wanted), labels)

    def ordinary(self, name: str, *labels: str) -> Counter[tuple[str, ...]]:
        """What `increase` makes of it. Right at the time of a scrape if every series began at zero, in this range."""
        return self._asked(f"sum by ({','.join(labels)}) (increase({name}[{self.end - self.begin:.0f}s]))", labels)

    def _asked(self, query: str, labels: tuple[str, ...]) -> Counter[tuple[str, ...]]:
        found = self.prometheus.query(query, self.end)
        values = {tuple(each["metric"][label] for label in labels): float(each["value"][1]) for each in found}
        return Counter({key: value for key, value in values.items() if value})


FAULTS = (FailureClass.INTERNAL, FailureClass.COLLECTIVE, FailureClass.NON_FINITE, FailureClass.PREEMPTED)


async def _live(world: World, recording: Recording, rng: random.Random, numbers: Iterator[int], lives: int) -> None:
    """Jobs run, fail, end and are deleted until the operator has died often enough."""
    world.weather.deaths, world.weather.faults = 0.02, 0.05
    while world.num_lives <= lives:
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


async def _rest(world: World, recording: Recording) -> None:
    world.weather.deaths = world.weather.faults = 0.0
    for number in range(20):
        await world.rest(1, succeed=False)
        recording.scrape(is_last=number == 19)


async def _story(world: World, witness: Witness, recording: Recording, rng: random.Random) -> tuple[float, Witness]:
    """A time in the middle, after a quarter of an hour without a scrape, and what had happened before that."""
    numbers = itertools.count(1)
    world.start_operator()
    world.invariants.counted_faults = True
    await _live(world, recording, rng, numbers, KILLS // 2)
    await _rest(world, recording)
    before, middle = copy.copy(witness), recording.now + 900.0
    before.ended, before.restarts = witness.ended.copy(), witness.restarts.copy()
    recording.missed_until = recording.now + 1200.0
    await _live(world, recording, rng, numbers, KILLS)
    for job in world.server.all(JOBS):
        if not is_true(job, "Finished"):
            world.edit_run(job, cancel=True)
    await _rest(world, recording)
    return middle, before


def test_increases_add_up_over_a_hundred_deaths_of_the_operator_and_deletions_of_jobs(tmp_path: Path) -> None:
    loop = VirtualLoop()
    world = World(loop, random.Random("counters"))
    witness, recording = Witness(world), Recording(world, random.Random("scrapes"))
    world.server.watchers.append(witness.saw)
    profile: dict[str, Any] = {"gpu": {"memory": "80Gi", "pricePerHour": "2.50"}}
    world.people_prepare([], profile)
    begin = recording.now - 3600.0
    middle, before = run(_story(world, witness, recording, random.Random("story")), loop)

    past = "\n".join((*recording.lines, "# EOF\n"))
    with running_prometheus(tmp_path / "prometheus", free_port(), [], {"groups": []}, past) as prometheus:
        _compare(prometheus, witness, begin, recording.now)
        # No scrape is near the beginning of this range, and most series are not at zero there.
        late = Counted(prometheus, middle, recording.now)
        assert late.by(*ENDED) == witness.ended - before.ended
        assert late.by(*RESTARTS) == witness.restarts - before.restarts
        assert 0 < sum(before.ended.values()) < sum(witness.ended.values())
        print(
            f"{len(recording.lines)} samples; of {sum(late.by(*ENDED).values())} ended in the second half, an ordinary increase"
        )
        print(f"shows {sum(late.ordinary(*ENDED).values())}")
    assert world.num_lives > KILLS


ENDED = ("finetune_jobs_total", "namespace", "result", "reason")
RESTARTS = ("finetune_restarts_total", "namespace", "class", "counted")


def _compare(prometheus: Prometheus, witness: Witness, begin: float, end: float) -> None:
    counted, window = Counted(prometheus, begin, end), f"[{end - begin:.0f}s]"
    found = counted.by("finetune_gpu_seconds_total", "outcome")
    total = sum(found.values())
    ordinary = sum(counted.ordinary("finetune_gpu_seconds_total", "outcome").values())
    print(
        f"{witness.deleted_jobs} jobs deleted, {sum(witness.ended.values())} ended, "
        f"{sum(witness.restarts.values())} restarts, {len(witness.held)} pods, {total:.0f} of {witness.gpu_seconds:.0f} "
        f"GPU seconds ({dict(found)}), by an ordinary increase {ordinary:.0f}"
    )
    assert witness.deleted_jobs > 20
    assert len(witness.restarts) > 3
    assert len(witness.ended) > 4
    for name in ("jobs_total", "restarts_total", "gpu_seconds_total", "cost_total", "phase_duration_seconds_count"):
        (resets,) = prometheus.query(f"sum(resets(finetune_{name}{window}))", end)
        assert float(resets["value"][1]) == 0, name
    assert counted.by(*ENDED) == counted.ordinary(*ENDED) == witness.ended
    assert counted.by(*RESTARTS) == counted.ordinary(*RESTARTS) == witness.restarts
    assert abs(total - ordinary) < 1e-6 * total
    assert abs(total - witness.gpu_seconds) < 0.01 * witness.gpu_seconds
    cost = sum(counted.by("finetune_cost_total", "team").values())
    assert abs(cost - total / 3600 * 2.5) < 1e-6 * cost
    phases = counted.by("finetune_phase_duration_seconds_count", "phase")
    assert phases[("pending",)] == witness.started, "each job's phases are observed once"
    assert 0 < witness.stepped < witness.started
    assert sum(counted.by("finetune_time_to_first_step_seconds_count", "queue").values()) == witness.stepped
