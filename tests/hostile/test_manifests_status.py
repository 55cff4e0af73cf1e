"""A status that somebody has edited: whatever the definition's schema lets through, every pass ends in a decision."""

import os
from collections import Counter
from datetime import UTC, datetime
from random import Random
from typing import Any

from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.cache.projection import project
from finetune_operator.cache.reader import Reader
from finetune_operator.client.kinds import JOBS
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.observed import Observed, ProfileView
from tests.hostile.manifests import spoil, status_schema, value_of
from tests.support.source_seed import seed_of_the_sources
from tests.unit.finetune_operator import objects

SEED = int(os.environ.get("HOSTILE_SEED", seed_of_the_sources()))
STATUSES = 1500
NOW = datetime(2026, 1, 1, tzinfo=UTC)
TIMES = ("2025-12-31T00:00:00Z", "2025-12-31T00:00:00.5Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "yesterday", "")
CLAIMS = frozenset({"models", "data", "results", "workspace"})


def status_of(random: Random) -> dict[str, Any]:
    """A status as the schema has it, often far enough on its way for the later stages to look at it."""
    status: dict[str, Any] = value_of(random, status_schema())
    if random.random() < 0.7:
        status["conditions"] = [
            {
                "type": str(kind),
                "status": random.choice(("True", "False", "Unknown")),
                "reason": random.choice((*map(str, Reason), "Invented")),
                "lastTransitionTime": random.choice(TIMES),
            }
            for kind in random.sample(list(ConditionType), random.randint(0, len(ConditionType)))
        ]
    if random.random() < 0.7:
        status |= {"startTime": random.choice(TIMES), "plan": {"hash": "0" * random.choice((0, 64))}}
    if random.random() < 0.5:
        status["completionTime"] = random.choice(TIMES)
    if random.random() < 0.5:
        status["attempts"] = [{"number": 0, "outcome": "Failed", "endTime": random.choice(TIMES)}]
    return status


def job_with(random: Random, status: dict[str, Any]) -> dict[str, Any]:
    run = {
        "activeDeadlineSeconds": random.choice((10, 31_536_000)),
        "ttlSecondsAfterFinished": random.choice((0, 31_536_000)),
        "suspend": random.random() < 0.2,
        "cancel": random.random() < 0.1,
        "retry": random.randint(0, 3),
    }
    return objects.finetune_job(status=status, run=run)


def test_every_pass_ends_in_a_decision() -> None:
    random, decided = Random(SEED), Counter[str]()
    profile = ProfileView("default", FineTuneProfileSpec(trainer_image="trainer"))
    for number in range(STATUSES):
        document = job_with(random, status_of(random))
        try:
            held = project(JOBS, document)
            job = Reader().job(held).view
            actions = reconcile(Observed(job=job, profile=profile, claims=CLAIMS), NOW)
        except Exception as error:
            error.add_note(f"HOSTILE_SEED={SEED}, status {number}: {document['status']}")
            raise
        decided["written" if actions.status is not None else "left alone"] += 1
    assert min(decided.values()) > STATUSES / 50, decided


def test_statuses_that_no_schema_allows_can_be_cached() -> None:
    random = Random(SEED)
    for _ in range(STATUSES):
        status = status_of(random)
        for _ in range(3):
            spoil(random, status)
        held = project(JOBS, job_with(random, status))
        assert held.summary is not None
        assert held.summary.profile == "default"
