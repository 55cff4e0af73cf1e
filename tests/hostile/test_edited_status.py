"""Whatever somebody has written into the status of a job, its pods, its Jobs and the ConfigMap of its size: a pass ends, decides
within its bounds, and writes what the API server takes."""

import json
import os
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from random import Random
from typing import Any

from pydantic import ValidationError

from finetune_job.names import Role
from finetune_job.progress import Progress
from finetune_job.stored_status import read_status
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.children_seen import BatchJobView, JobConditionView, LiveChildren, LiveJob, PodView
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.stage import attempt_of, is_ended
from finetune_operator.decide.stages.train_stage import queue_of_growth
from finetune_operator.passes.execute import status_document
from tests.hostile.manifests import Document, status_schema
from tests.hostile.test_written_status import assert_storable, report_of
from tests.support.builders import T0, ObservedBuilder, a_job, observing
from tests.support.source_seed import seed_of_the_sources

SEED = int(os.environ.get("HOSTILE_SEED", seed_of_the_sources()))
OBSERVATIONS = 1200
FEWEST, MOST = 2, 4
TIMES = ("", "2026-01-01T11:50:00Z", "2027-01-01T12:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "soon")
INTEGERS = (0, 1, 2, 3, -1, 50, 2**31, 2**53, 2**62, -(2**62), 10**9, 999_999_999)
TEXTS = ("", "1", "nan", "1e400", "x" * 20, "é💥")
MOMENTS = [
    *(T0 + timedelta(seconds=seconds) for seconds in (-1e6, -700, -300, -130, -1, 0, 20, 1e6)),
    datetime(1970, 1, 1, tzinfo=UTC),
    datetime(2199, 12, 31, 23, 59, 59, tzinfo=UTC),
]


def drawn(random: Random, schema: Document, name: str = "") -> Any:
    """A value that the API server would take."""
    if "enum" in schema:
        return random.choice(schema["enum"])
    match schema.get("type"):
        case "object":
            required, properties = schema.get("required", ()), schema.get("properties", {})
            return {key: drawn(random, each, key) for key, each in properties.items() if key in required or random.random() < 0.7}
        case "array":
            count = min(random.choice((0, 1, 2, 5)), schema.get("maxItems", 5))
            return [drawn(random, schema["items"], name) for _ in range(count)]
        case "integer":
            return max(random.choice(INTEGERS), schema.get("minimum", -(2**63)))
        case "boolean":
            return random.random() < 0.5
        case _:
            is_time = name.endswith("Time") or name in ("time", "inARowSince", "gpuSecondsUntil")
            return random.choice(TIMES if is_time else TEXTS)[: schema.get("maxLength", 99)]


def moment(random: Random, share: float = 0.6) -> datetime | None:
    return random.choice(MOMENTS) if random.random() < share else None


def pod(random: Random, role: Role, attempt: int, rank: int) -> PodView:
    return PodView(
        f"tune-{role}-{attempt}-{rank}",
        f"uid-{random.randrange(10**6)}",
        role,
        attempt,
        random.choice(MOMENTS),
        node_rank=rank,
        phase=random.choice(("Pending", "Running", "Running", "Succeeded", "Failed", "Unknown")),
        gone=random.random() < 0.15,
        deletion_requested=moment(random, 0.2),
        deletion_due=moment(random, 0.2),
        scheduled=moment(random),
        disruption=random.choice(("", "", "DeletionByTaintManager", "PreemptionByScheduler")),
        started=moment(random),
        finished=moment(random, 0.4),
        exit_code=random.choice((None, None, 0, 1, 137, 143, 50, 52, -3, 2**40)),
        reason=random.choice(("", "OOMKilled", "Evicted", "Unknown")),
        termination_message=random.choice(("", report_of(random))),
        waiting_reason=random.choice(("", "", "ImagePullBackOff", "CreateContainerConfigError")),
        unschedulable=random.choice(("", "", "0/9 nodes are available")),
        node=random.choice(("", "node-a")),
    )


def batch_job(random: Random, role: Role, attempt: int) -> BatchJobView:
    kinds = ("FailureTarget", "Failed", "SuccessCriteriaMet", "Complete", "Suspended")
    found = (JobConditionView(random.choice(kinds), since=moment(random)) for _ in range(random.choice((0, 0, 1, 2))))
    return BatchJobView(
        f"tune-{role}-{attempt}",
        f"uid-{role}-{attempt}",
        role,
        attempt,
        random.choice(MOMENTS),
        conditions=tuple(found),
        suspended=random.random() < 0.3,
        parallelism=random.choice((None, 0, 1, 2, 4, 99, -4)),
        start_time=moment(random),
        deleting=random.random() < 0.1,
    )


def progress(random: Random, attempt: int) -> Progress | None:
    numbers = (None, 0, 1, 50, 1e300, -1e300, float("nan"), float("inf"))
    said = {name: random.choice(numbers) for name in Progress.model_fields if random.random() < 0.5}
    try:
        return Progress.model_validate(said | {"attempt": attempt, "step": 50, "total_steps": 900, "checkpoint_step": 50})
    except ValidationError:
        return None


@cache
def stages(kind: int) -> tuple[ObservedBuilder, ...]:
    """A job of fixed size, an elastic one, and one of a queue, at each of its stages."""
    job = a_job()
    if kind:
        job = job.nodes(MOST).spec("training.reduction", "Ordered").spec("parallelism.elastic.minNodes", FEWEST)
        job = job.with_profile(elastic={"shrinkAfterSeconds": 120, "growAfterSeconds": 600})
        job = job.run(stallDeadlineSeconds=600, activeDeadlineSeconds=3600, **({"queueName": "gpus"} if kind == 2 else {}))
    seen = observing(job)
    return seen.started(), seen.prepared(), seen.training(), seen.trained(), seen.merged()


def observation(random: Random) -> Observed:
    seen = random.choice(stages(random.randrange(3)))
    kept = json.loads(json.dumps(status_document(seen.status)))
    edited = {key: each for key, each in drawn(random, status_schema()).items() if random.random() < 0.5}
    if random.random() < 0.8:
        # What has begun stays so, or hardly anything but the first stage would be tried.
        edited = {key: each for key, each in edited.items() if key not in ("conditions", "plan", "startTime")}
    status = read_status(kept | edited)
    numbers = {role: attempt_of(status, role) for role in Role}
    jobs: list[BatchJobView] = []
    pods: list[PodView] = []
    for role in {seen.role, random.choice(list(Role))}:
        number = numbers[role] + random.choice((0, 0, 0, -1, 1))
        jobs += [batch_job(random, role, number)] * (random.random() < 0.8)
        pods += [pod(random, role, number, rank) for rank in range(random.choice((0, 1, 4)))]
    leftovers = tuple(LiveJob(job.name, job.uid) for job in jobs if random.random() < 0.3)
    return seen.but(
        status=status,
        batch_jobs=tuple(jobs),
        pods=tuple(pods),
        live=LiveChildren(leftovers) if random.random() < 0.6 else None,
        progress=progress(random, numbers[Role.TRAIN]) if random.random() < 0.6 else None,
        waiting_in_queue=random.choice((None, 0, 3)),
    ).build()


def check_pass(seen: Observed) -> str:
    """Which kind of pass it was, for the count of what was tried."""
    queue_of_growth(seen, T0)
    actions = reconcile(seen, T0)
    before, after = seen.job.status, actions.status or seen.job.status
    elastic = seen.job.spec is not None and seen.job.spec.parallelism.elastic is not None
    assert not (is_ended(before) and actions.creates), "nothing is created after the end"
    for made in (one.body for one in actions.creates if one.kind == "Job" and "-train-" in one.name):
        assert made["spec"]["parallelism"] in (range(FEWEST, MOST + 1) if elastic else (1,))
    for role in Role:
        assert attempt_of(after, role) - attempt_of(before, role) in (0, 1)
    if after.gang_nodes not in (None, before.gang_nodes):
        assert elastic
        assert FEWEST <= after.gang_nodes <= MOST
    assert after.restarts.counted - before.restarts.counted in (0, 1) or after.restarts.counted == 0
    if actions.status is not None:
        assert_storable(after, seen.pods)
    reconcile(replace(seen, job=replace(seen.job, status=after)), T0)
    return "restarted" if after.attempt > before.attempt else "ended" if is_ended(after) else "went on"


def test_an_edited_status_ends_no_pass_and_leads_out_of_no_bounds() -> None:
    random, outcomes = Random(SEED), Counter[str]()
    for number in range(OBSERVATIONS):
        seen = observation(random)
        try:
            outcomes[check_pass(seen)] += 1
        except Exception as error:
            error.add_note(f"HOSTILE_SEED={SEED}, observation {number}: {seen.job.status!r:.3000}")
            raise
    assert min(outcomes[kind] for kind in ("restarted", "ended", "went on")) > OBSERVATIONS / 50, outcomes
