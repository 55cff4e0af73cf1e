"""Summaries of jobs and profiles for metrics, polls and the waiting line, which therefore need not parse the objects. The length
of each string is limited.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import NamedTuple

from finetune_job.api.method import MethodSpec
from finetune_job.api.profile import GpuResource
from finetune_job.names import DEFAULT_PROFILE, GPU_PRODUCT_LABEL, LABEL_TEAM
from finetune_operator.client.raw_objects import Fields

LONGEST_REASON = 256
LONGEST_LABEL = 63
"""Maximum length of a metric label whose value a user chooses, in characters."""
NUMBERS = {"loss": "loss", "eval_loss": "evalLoss", "tokens_per_second": "tokensPerSecond", "goodput": "goodput"}
"""Key of a number in `JobSummary.numbers` -> field of `status.progress`."""
DEFAULT_GPU_RESOURCE = str(GpuResource.model_fields["resource_name"].default)
DEFAULT_METHOD = str(MethodSpec.model_fields["type"].default)
_PRICE = re.compile(r"[0-9]+(\.[0-9]+)?")


class ProfileSummary(NamedTuple):
    """Summary of a profile for the metrics and the waiting line."""

    max_active_jobs: int | None = None
    queue: str = ""
    """Default queue of training Jobs, for FineTuneJobs that do not name a queue."""
    gpu: str = ""
    """Accelerator of training pods: the product in the node selector, or else the resource name; empty without accelerators."""
    price: str = ""
    """Price of one GPU per hour; empty if no valid price is set."""


@dataclass(frozen=True, slots=True)
class JobSummary:
    """Summary of a FineTuneJob for metrics, polls and the waiting line. Times that the status lacks are None."""

    profile: str
    phase: str
    conditions: tuple[tuple[str, str, str], ...]
    """Type, status and reason of each condition."""
    outcomes: tuple[tuple[str, str, bool], ...]
    """Outcome of each recorded attempt, its failure class (empty if it has none), and whether the failure was counted."""
    attempt: int
    """The current attempt of training."""
    is_finished: bool
    is_training: bool
    """Whether the job is prepared, but neither trained nor finished: only then does rank 0 report progress."""
    created: datetime | None = None
    is_started: bool = False
    """Whether the plan is frozen."""
    is_waiting: bool = False
    """Whether the job has not started and only waits for its turn: it is not suspended, cancelled or stalled."""
    team: str = ""
    queue: str = ""
    method: str = ""
    model: str = ""
    """Last segment of the model's source."""
    nodes: int = 1
    processes: int = 1
    """Number of processes per node."""
    start: datetime | None = None
    completion: datetime | None = None
    advanced: datetime | None = None
    """When the training step last changed."""
    numbers: tuple[tuple[str, float], ...] = ()
    """The known numbers, by name."""
    saved: datetime | None = None
    """When the newest checkpoint was first seen."""
    gpu_seconds: tuple[int, int, int] = (0, 0, 0)
    """GPU seconds in status: waiting, productive and lost."""
    gpu_seconds_until: datetime | None = None
    """The moment up to which the GPU seconds are counted."""
    has_result: bool = False
    """Whether the outcome of the job is decided."""


def job_summary(fields: Fields) -> JobSummary:
    """Summarise a FineTuneJob."""
    metadata, spec, status = fields.at("metadata"), fields.at("spec"), fields.at("status")
    run, parallelism, progress, restarts = spec.at("run"), spec.at("parallelism"), status.at("progress"), status.at("restarts")
    conditions: dict[str, tuple[str, str]] = {
        item.text("type", LONGEST_REASON): (item.text("status", 16), item.text("reason", LONGEST_REASON))
        for item in status.items("conditions")
    }
    true = {kind for kind, (value, _) in conditions.items() if value == "True"}
    started, stopped = bool(status.text("startTime", 32)), run.flag("suspend") or run.flag("cancel")
    step, total = progress.integer("step") or 0, progress.integer("totalSteps") or 0
    estimate = status.at("memory").integer("estimate") or 0
    numbers: dict[str, float | None] = {
        "progress": min(step / total, 1.0) if total > 0 else None,
        "restarts": float((restarts.integer("counted") or 0) + (restarts.integer("uncounted") or 0)),
        "memory_estimate": float(estimate) if estimate > 0 else None,
    }
    for name, field_name in NUMBERS.items():
        with suppress(ValueError):
            value = float(progress.text(field_name, 32))
            numbers[name] = value if isfinite(value) else None
    waiting, productive, lost = (status.at("gpuSeconds").integer(outcome) or 0 for outcome in ("waiting", "productive", "lost"))
    return JobSummary(
        profile=spec.name("profile") or DEFAULT_PROFILE,
        phase=status.text("phase", LONGEST_REASON) or "Pending",
        conditions=tuple((kind, *state) for kind, state in conditions.items()),
        outcomes=tuple(
            (item.text("outcome", 32) or "Running", item.text("failure", 64), item.flag("counted"))
            for item in status.items("attempts")
        ),
        attempt=status.integer("attempt") or 0,
        is_finished="Finished" in true,
        is_training="Prepared" in true and not true & {"Trained", "Finished"},
        created=metadata.time("creationTimestamp"),
        is_started=started,
        is_waiting=not (started or stopped or true & {"Finished", "Stalled"}),
        team=metadata.at("labels").text(LABEL_TEAM, LONGEST_LABEL),
        queue=run.text("queueName", LONGEST_LABEL),
        method=spec.at("method").text("type", LONGEST_LABEL) or DEFAULT_METHOD,
        model=spec.at("model").text("source", LONGEST_REASON).rstrip("/").rpartition("/")[2][:LONGEST_LABEL],
        nodes=status.integer("gangNodes") or parallelism.integer("nodes") or 1,
        processes=parallelism.integer("processesPerNode") or 1,
        start=status.time("startTime"),
        completion=status.time("completionTime"),
        advanced=progress.time("advancedTime"),
        numbers=tuple((name, value) for name, value in numbers.items() if value is not None),
        saved=progress.time("checkpointTime"),
        gpu_seconds=(waiting, productive, lost),
        gpu_seconds_until=status.time("gpuSecondsUntil"),
        has_result=conditions.get("Succeeded", ("Unknown", ""))[0] in ("True", "False"),
    )


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
