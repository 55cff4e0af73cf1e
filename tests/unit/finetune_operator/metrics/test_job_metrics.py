"""Gauges of jobs: what they say, how many there are, and what a hostile object can do to them."""

from __future__ import annotations

from datetime import UTC, datetime
from math import isnan
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from finetune_operator.cache.cache import Cache
from finetune_operator.cache.projection import project
from finetune_operator.client.kinds import BATCH_JOBS, JOBS, PODS, PROFILES
from finetune_operator.metrics.job_metrics import JobCollector
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.fakes import Clock

NUM_JOBS = 1000
MOST_SERIES = 25
STATUS = {
    "phase": "Training",
    "startTime": "2026-01-02T03:05:00Z",
    "completionTime": "2026-01-02T05:05:00Z",
    "attempt": 1,
    "restarts": {"counted": 1, "uncounted": 2},
    "memory": {"estimate": 6000000000, "limit": 80000000000},
    "progress": {
        "step": 30,
        "totalSteps": 120,
        "loss": "1.25",
        "evalLoss": "1.5",
        "tokensPerSecond": "4000",
        "goodput": "0.9",
        "advancedTime": "2026-01-02T03:35:00Z",
    },
    "conditions": [{"type": "Ready", "status": "True", "reason": "Running"}, {"type": "Prepared", "status": "True"}],
}
Samples = dict[str, list[tuple[dict[str, str], float]]]


def samples(collector: Any) -> Samples:
    registry = CollectorRegistry()
    registry.register(collector)
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def a_cache(*jobs: dict[str, Any], **profile: Any) -> Cache:
    cache = Cache(Clock())
    spec = {"trainerImage": "x", "gpu": {}, **profile}
    cache.apply(PROFILES, project(PROFILES, {"metadata": objects.metadata("default", "profile"), "spec": spec}))
    for document in jobs:
        cache.apply(JOBS, project(JOBS, document))
    return cache


def a_job(number: int = 0, status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    document = objects.finetune_job(number + 1, STATUS if status is None else status, uid=f"uid-{number}", **spec)
    document["metadata"]["name"] = f"tune-{number}"
    return document


def test_a_job_is_described_by_its_status() -> None:
    job = a_job(
        model={"source": "hf://org/Tiny-1B"},
        method={"type": "QLoRA"},
        run={"queueName": "night"},
        parallelism={"nodes": 2, "processesPerNode": 8},
    )
    job["metadata"]["labels"] = {"finetune.dev/team": "red"}
    found = samples(JobCollector(a_cache(job)))
    names = {"namespace": "team", "name": "tune-0"}
    info = {"uid": "uid-0", "team": "red", "queue": "night", "method": "QLoRA", "profile": "default", "gpu": "nvidia.com/gpu"}
    assert found.pop("finetune_job_info") == [({**names, **info, "model": "Tiny-1B"}, 1)]
    assert found.pop("finetune_job_status") == [({**names, "state": "Training"}, 1)]
    held = {name: value for name, value in (names | info).items() if name != "method"}
    outcomes = ("waiting", "productive", "lost", "unsaved")
    assert found.pop("finetune_job_gpu_seconds") == [({**held, "outcome": outcome}, 0) for outcome in outcomes]
    assert {name: values for name, values in found.items() if values != [(names, values[0][1])]} == {}
    assert {name: values[0][1] for name, values in found.items()} == {
        "finetune_job_gpus": 16,
        "finetune_job_progress_ratio": 0.25,
        "finetune_job_loss": 1.25,
        "finetune_job_eval_loss": 1.5,
        "finetune_job_tokens_per_second": 4000,
        "finetune_job_goodput_ratio": 0.9,
        "finetune_job_restarts": 3,
        "finetune_job_memory_estimate_bytes": 6000000000,
        "finetune_job_created_timestamp_seconds": 1767323045,
        "finetune_job_start_timestamp_seconds": 1767323100,
        "finetune_job_completion_timestamp_seconds": 1767330300,
        "finetune_job_last_step_timestamp_seconds": 1767324900,
    }
    smaller = a_job(status=STATUS | {"gangNodes": 1}, parallelism={"nodes": 2, "processesPerNode": 8})
    assert samples(JobCollector(a_cache(smaller)))["finetune_job_gpus"] == [(names, 8)]


def test_a_job_that_waits_says_for_what_until_it_has_ended() -> None:
    ready = {"type": "Ready", "status": "False", "reason": "Queued"}
    found = samples(JobCollector(a_cache(a_job(status={"conditions": [ready]}))))
    assert found["finetune_job_waiting"] == [({"namespace": "team", "name": "tune-0", "reason": "Queued"}, 1)]
    assert "finetune_job_gpus" not in found
    for kind in ("Succeeded", "Finished"):
        ended = {"conditions": [ready, {"type": kind, "status": "True", "reason": "Completed"}]}
        assert "finetune_job_waiting" not in samples(JobCollector(a_cache(a_job(status=ended))))


def test_an_estimate_that_is_none_is_not_reported() -> None:
    for estimate in ("much", 0, -1, None):
        assert "finetune_job_memory_estimate_bytes" not in samples(
            JobCollector(a_cache(a_job(status={"memory": {"estimate": estimate}})))
        )


def test_a_thousand_jobs_have_fewer_than_25_series_each() -> None:
    found = samples(JobCollector(a_cache(*(a_job(number) for number in range(NUM_JOBS)))))
    number = sum(map(len, found.values()))
    print(f"{number} series of {NUM_JOBS} jobs: {number / NUM_JOBS:g} each")
    assert number < MOST_SERIES * NUM_JOBS
    assert number == 18 * NUM_JOBS


HOSTILE = 'x"\n\\{}' + "y" * 500


@pytest.mark.parametrize(
    "job",
    [
        a_job(method={"type": HOSTILE}, run={"queueName": HOSTILE}, model={"source": HOSTILE}, parallelism={"nodes": "two"}),
        a_job(status={"progress": {"step": -5, "totalSteps": 0, "loss": "nan", "evalLoss": "1e999", "goodput": [], "step_": 1}}),
        a_job(status={"phase": HOSTILE, "restarts": "many", "startTime": "yesterday", "conditions": [{"type": "Ready"}]}),
        a_job(status={"memory": {"estimate": "much"}}),
        a_job(status={"memory": {"estimate": -1}}),
        a_job(method="LoRA", run=7, model=[], parallelism={"processesPerNode": None}),
    ],
)
def test_nothing_that_a_job_holds_breaks_a_scrape_or_makes_a_long_label(job: dict[str, Any]) -> None:
    found = samples(JobCollector(a_cache(job, gpu={"resourceName": HOSTILE, "pricePerHour": "dear"})))
    longest = max(len(value) for values in found.values() for labels, _ in values for value in labels.values())
    assert longest <= 256
    ((info, _),) = found["finetune_job_info"]
    assert max(map(len, info.values())) <= 63
    assert not any(isnan(value) for values in found.values() for _, value in values)


TRAINED = {"type": "Trained", "status": "True", "reason": "Completed"}
RUNNING = {
    "phase": "Running",
    "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-02T03:31:00Z"}],
    "containerStatuses": [{"state": {"running": {"startedAt": "2026-01-02T03:32:00Z"}}}],
}
COUNTED = {"gpuSeconds": {"waiting": 40, "productive": 800, "lost": 160}, "gpuSecondsUntil": "2026-01-02T03:30:00Z"}


def gpu_seconds(cache: Cache) -> dict[str, float]:
    found = samples(JobCollector(cache, now=lambda: datetime(2026, 1, 2, 3, 40, tzinfo=UTC))).get("finetune_job_gpu_seconds", [])
    for labels, _ in found:
        outcome = labels.pop("outcome")
        assert labels == {
            "namespace": "team",
            "name": "tune-0",
            "uid": labels["uid"],
            "team": "team",
            "queue": "",
            "profile": "default",
            "gpu": "nvidia.com/gpu",
        }
        labels["outcome"] = outcome
    return {labels["outcome"]: value for labels, value in found}


def test_gpu_seconds_are_those_of_status_and_what_the_pods_of_the_attempt_have_held_since() -> None:
    nothing = {"waiting": 0, "productive": 0, "lost": 0, "unsaved": 0}
    assert gpu_seconds(a_cache(a_job())) == nothing, "they begin at zero"
    assert gpu_seconds(a_cache(a_job(status={}))) == {}, "not before the start"
    assert gpu_seconds(a_cache(a_job(), gpu=None)) == {}
    progress = STATUS["progress"] | {"checkpointTime": "2026-01-02T03:36:00Z"}
    job = a_job(status=STATUS | COUNTED | {"progress": progress}, parallelism={"processesPerNode": 4})
    job["metadata"]["uid"] = "job-uid"
    cache = a_cache(job)
    assert gpu_seconds(cache) == nothing | {"waiting": 40, "productive": 800, "lost": 160}
    for attempt in (0, 1):
        cache.take(BATCH_JOBS, objects.batch_job(attempt=attempt))
        cache.take(PODS, objects.pod(attempt=attempt, status=RUNNING))
    assert gpu_seconds(cache) == {"waiting": 40 + 4 * 60, "productive": 800 + 4 * 240, "lost": 160, "unsaved": 4 * 240}
    job["status"] = STATUS | COUNTED | {"conditions": [*STATUS["conditions"], TRAINED]}
    job["metadata"]["resourceVersion"] = "50"
    cache.take(JOBS, job)
    assert sum(gpu_seconds(cache).values()) == 1000


def test_prices_are_those_of_the_profiles() -> None:
    found = samples(JobCollector(a_cache(gpu={"pricePerHour": "2.50"})))
    assert found["finetune_profile_gpu_hour_price"] == [({"profile": "default"}, 2.5)]
    assert "finetune_profile_gpu_hour_price" not in samples(JobCollector(a_cache(gpu={"pricePerHour": "dear"})))
