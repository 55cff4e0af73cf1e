"""Summaries of jobs and profiles for metrics, polls and the waiting line, which need not parse them again. The length of each
text is limited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from math import isfinite
from typing import NamedTuple, TypeVar

from finetune_job.api.method import MethodSpec
from finetune_job.api.profile import GpuResource
from finetune_job.names import DEFAULT_PROFILE, GPU_PRODUCT_LABEL, LABEL_TEAM, Role
from finetune_operator.cluster.raw_objects import Fields
from finetune_operator.decide.job_numbers import number_of_job

T = TypeVar("T")
LONGEST_REASON = 256
LONGEST_LABEL = 63
"""Longest label of a metric that a user writes, in characters."""
NUMBERS = {
    "loss": "loss",
    "eval_loss": "evalLoss",
    "tokens_per_second": "tokensPerSecond",
    "goodput": "goodput",
}
"""Fact -> field of `status.progress`."""
DEFAULT_GPU_RESOURCE = str(GpuResource.model_fields["resource_name"].default)
DEFAULT_METHOD = str(MethodSpec.model_fields["type"].default)
_PRICE = re.compile(r"[0-9]+(\.[0-9]+)?")
_CPU_ROLES = ("fetch", "preflight", "merge", "publish")
KEPT_TUPLES = 1024


class ProfileSummary(NamedTuple):
    """Summary of a profile for the metrics and the waiting line."""

    max_active_jobs: int | None = None
    queue: str = ""
    """Queue of training Jobs that name none."""
    gpu: str = ""
    """Accelerator of its training pods: the product in the node selector, else the resource; empty for the CPU."""
    price: str = ""
    """Price of one GPU for an hour; empty if none."""


class JobFacts(NamedTuple):
    """Facts about one job for the metrics. Texts are cut to `LONGEST_LABEL`; numbers that the status does not have are None."""

    team: str = ""
    queue: str = ""
    method: str = ""
    model: str = ""
    """Last segment of the source."""
    nodes: int = 1
    processes: int = 1
    """Processes of each node."""
    start: datetime | None = None
    completion: datetime | None = None
    advanced: datetime | None = None
    """When the step last changed."""
    numbers: tuple[tuple[str, float], ...] = ()
    """The known numbers, by name."""
    checkpoint: int | None = None
    """Step of the newest checkpoint."""
    attempts: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    """Current attempt of each role, in the order of `Role`."""
    has_result: bool = False
    """Whether it is decided how the job ends."""


NO_FACTS = JobFacts()


@dataclass(frozen=True, slots=True)
class JobSummary:
    """Summary of a FineTuneJob for metrics and polls, which need not parse it again."""

    profile: str
    phase: str
    conditions: tuple[tuple[str, str, str], ...]
    """Type, status, reason."""
    outcomes: tuple[tuple[str, str, bool], ...]
    """Outcome, failure class (empty without one) and whether it was counted, for each recorded attempt."""
    attempt: int
    """The current attempt of training."""
    job_number: int
    """Number in the name of the Job that runs it."""
    is_finished: bool
    is_training: bool
    """Whether it is prepared, not trained and not finished, so that rank 0 may report progress."""
    created: datetime | None = None
    is_started: bool = False
    """Whether the plan is frozen."""
    is_waiting: bool = False
    """Whether it is not started and only waits for its turn: it is neither suspended nor cancelled, and no human has to act
    first."""
    facts: JobFacts = NO_FACTS


@lru_cache(KEPT_TUPLES)
def _shared(value: tuple[T, ...]) -> tuple[T, ...]:
    """Return one shared tuple for equal ones: thousands of jobs that have ended have the same conditions and outcomes."""
    return value


def job_summary(fields: Fields) -> JobSummary:
    """Summarise a FineTuneJob."""
    status = fields.at("status")
    conditions: dict[str, tuple[str, str]] = {
        item.text("type", LONGEST_REASON): (item.text("status", 16), item.text("reason", LONGEST_REASON))
        for item in status.items("conditions")
    }

    def holds(kind: str) -> bool:
        return conditions.get(kind, ("", ""))[0] == "True"

    started, run = bool(status.text("startTime", 32)), fields.at("spec").at("run")
    return JobSummary(
        profile=fields.at("spec").name("profile") or DEFAULT_PROFILE,
        phase=status.text("phase", LONGEST_REASON) or "Pending",
        conditions=_shared(tuple((kind, *state) for kind, state in conditions.items())),
        outcomes=_shared(
            tuple(
                (item.text("outcome", 32) or "Running", item.text("failure", 64), item.flag("counted"))
                for item in status.items("attempts")
            )
        ),
        attempt=status.integer("attempt") or 0,
        job_number=_job_number(status),
        is_finished=holds("Finished"),
        is_training=holds("Prepared") and not holds("Trained") and not holds("Finished"),
        created=fields.at("metadata").time("creationTimestamp"),
        is_started=started,
        is_waiting=not (started or holds("Finished") or holds("Stalled") or run.flag("suspend") or run.flag("cancel")),
        facts=_facts(fields, conditions),
    )


def _job_number(status: Fields) -> int:
    """Number of the Job of the current attempt of training."""
    continued = [
        item.integer("number")
        for item in status.items("attempts")
        if item.flag("continued") and item.text("role", 16) in ("", Role.TRAIN)
    ]
    return number_of_job(status.integer("attempt") or 0, [number for number in continued if number is not None])


def profile_summary(spec: Fields) -> ProfileSummary:
    """Summarise the spec of a FineTuneProfile."""
    gpu = spec.at("gpu")
    price = gpu.text("pricePerHour", 32)
    product = spec.at("nodeSelector").text(GPU_PRODUCT_LABEL, LONGEST_LABEL)
    return ProfileSummary(
        max_active_jobs=spec.integer("maxActiveJobs"),
        queue=spec.at("pods").at("train").text("queueName", LONGEST_LABEL),
        gpu=(product or gpu.text("resourceName", LONGEST_LABEL) or DEFAULT_GPU_RESOURCE) if spec.has("gpu") else "",
        price=price if _PRICE.fullmatch(price) else "",
    )


def _facts(fields: Fields, conditions: Mapping[str, tuple[str, str]]) -> JobFacts:
    spec, status = fields.at("spec"), fields.at("status")
    parallelism, progress, restarts = spec.at("parallelism"), status.at("progress"), status.at("restarts")
    step, total = progress.integer("step") or 0, progress.integer("totalSteps") or 0
    numbers: dict[str, float | None] = {
        "progress": min(step / total, 1.0) if total > 0 else None,
        "restarts": float((restarts.integer("counted") or 0) + (restarts.integer("uncounted") or 0)),
        "memory_estimate": _positive(status.at("memory").integer("estimate")),
        **{name: _number(progress.text(field_name, 32)) for name, field_name in NUMBERS.items()},
    }
    fetch, preflight, merge, publish = (status.integer(f"{role}Attempt") or 0 for role in _CPU_ROLES)
    return JobFacts(
        team=fields.at("metadata").at("labels").text(LABEL_TEAM, LONGEST_LABEL),
        queue=spec.at("run").text("queueName", LONGEST_LABEL),
        method=spec.at("method").text("type", LONGEST_LABEL) or DEFAULT_METHOD,
        model=spec.at("model").text("source", LONGEST_REASON).rstrip("/").rpartition("/")[2][:LONGEST_LABEL],
        nodes=status.integer("gangNodes") or parallelism.integer("nodes") or 1,
        processes=parallelism.integer("processesPerNode") or 1,
        start=status.time("startTime"),
        completion=status.time("completionTime"),
        advanced=progress.time("advancedTime"),
        numbers=tuple((name, value) for name, value in numbers.items() if value is not None),
        checkpoint=progress.integer("checkpointStep"),
        attempts=_shared((fetch, preflight, status.integer("attempt") or 0, merge, publish)),
        has_result=conditions.get("Succeeded", ("Unknown", ""))[0] in ("True", "False"),
    )


def _positive(number: int | None) -> float | None:
    return float(number) if number is not None and number > 0 else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None
