"""Counters of ended jobs, of restarts and of durations, in the memory of this process: a new process begins at zero."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.conditions import find_condition
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason
from finetune_operator.cache.cache import Cache
from finetune_operator.decide.failures.restart_policy import POLICY, Retry
from finetune_operator.decide.gang.attempts import newly_closed, record_of
from finetune_operator.decide.phases import FIRST_STEP, PHASES, phase_seconds
from finetune_operator.decide.seen.observed import JobView
from finetune_operator.decide.seen.stage import attempt_of, is_started
from finetune_operator.metrics.job_metrics import JobLabels, job_labels

ENDS = (
    ("Succeeded", Reason.COMPLETED),
    ("Cancelled", Reason.CANCELLED),
    *(
        ("Failed", reason)
        for reason in (
            Reason.FAILED,
            Reason.RESTARTS_EXHAUSTED,
            Reason.VERIFICATION_FAILED,
            Reason.STARTUP_DEADLINE_EXCEEDED,
            Reason.ACTIVE_DEADLINE_EXCEEDED,
        )
    ),
)
"""Results and reasons with which jobs end."""
RESTARTED = (
    *(
        (failure, "true" if policy.retry is Retry.COUNTED else "false")
        for failure, policy in POLICY.items()
        if policy.retry is not Retry.NEVER
    ),
    (FailureClass.STALLED, "false"),
)
"""Failure classes that may be followed by a restart, and whether the restart counts against `run.maxRestarts`."""
SECONDS_BUCKETS = (1, 5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 28_800, 86_400, 259_200)
"""Upper bounds of the histogram buckets. They suit jobs that find everything ready as well as jobs that train for days."""
MOST_LABELS = 1000
"""Maximum number of separate label sets, because users choose team and queue, and each label set has tens of series."""
OTHER = "other"


class JobCounters:
    """Counts ends, restarts and durations as this process writes them to status."""

    def __init__(self, cache: Cache, registry: CollectorRegistry) -> None:
        self._cache = cache
        self._known: set[JobLabels] = set()
        text = "FineTuneJobs that have ended, by result and reason."
        ended = ("namespace", "team", "method", "queue", "profile", "result", "reason")
        self._ended = Counter("finetune_jobs", text, ended, registry=registry)
        text = "Restarts of roles after a failure, by failure class, and whether they counted against maxRestarts."
        self._restarts = Counter("finetune_restarts", text, ("namespace", "team", "class", "counted"), registry=registry)

        def durations(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=SECONDS_BUCKETS, registry=registry)

        text = "Duration of the phases of jobs that have ended."
        self._phases = durations("finetune_phase_duration_seconds", text, "namespace", "queue", "phase")
        text = "Time from the start of a job to its first optimizer step, for jobs that have ended."
        self._first_step = durations("finetune_time_to_first_step_seconds", text, "namespace", "queue")

    def count(self, job: JobView, after: FineTuneJobStatus) -> None:
        """Count what a status that was just written adds to the previous status."""
        cached = self._cache.job_of_uid(job.uid)
        if cached is None:
            return
        labels, before = self._counted_labels(job_labels(self._cache, cached)[0], is_started(after)), job.status
        for role in Role:
            record = newly_closed(before, after, role, attempt_of(before, role))
            is_restarted = attempt_of(after, role) > attempt_of(before, role)
            if record is not None and record.outcome == AttemptOutcome.FAILED and is_restarted:
                failure, counted = record.failure or FailureClass.UNKNOWN, "true" if record.counted else "false"
                self._restarts.labels(labels.namespace, labels.team, failure, counted).inc()
        number = attempt_of(before, Role.TRAIN)
        old, new = record_of(before, Role.TRAIN, number), record_of(after, Role.TRAIN, number)
        known = len(old.restarts) if old is not None else 0
        # Restarts of ranks within their pod.
        for restart in new.restarts[known:] if new is not None else ():
            self._restarts.labels(labels.namespace, labels.team, restart.failure, "true").inc()
        end = _end(after)
        if end is None or _end(before) is not None:
            return
        self._ended.labels(*_place(labels), *end).inc()
        created = cached.summary.created if cached.summary is not None else None
        for phase, seconds in phase_seconds(after, created).items():
            if phase == FIRST_STEP:
                self._first_step.labels(labels.namespace, labels.queue).observe(seconds)
            else:
                self._phases.labels(labels.namespace, labels.queue, phase).observe(seconds)

    def _counted_labels(self, labels: JobLabels, has_started: bool) -> JobLabels:
        """Return the labels under which a job is counted, and start their series at zero, because PromQL's `increase` ignores the
        first value of a series.
        """
        # The profile of a job that has not started can be an arbitrary string.
        labels = labels if has_started else labels._replace(profile=OTHER)
        if labels not in self._known and len(self._known) >= MOST_LABELS:
            labels = JobLabels(labels.namespace, OTHER, OTHER, OTHER, OTHER, OTHER)
        if labels in self._known:
            return labels
        self._known.add(labels)
        for end in ENDS:
            self._ended.labels(*_place(labels), *end)
        for failure, counted in RESTARTED:
            self._restarts.labels(labels.namespace, labels.team, failure, counted)
        for phase in PHASES:
            if phase != FIRST_STEP:
                self._phases.labels(labels.namespace, labels.queue, phase)
        self._first_step.labels(labels.namespace, labels.queue)
        return labels


def _place(labels: JobLabels) -> tuple[str, ...]:
    return labels.namespace, labels.team, labels.method, labels.queue, labels.profile


def _end(status: FineTuneJobStatus) -> tuple[str, str] | None:
    """Result and reason of a job according to its status; None if it has not ended."""
    succeeded = find_condition(status.conditions, ConditionType.SUCCEEDED)
    if succeeded is None or succeeded.status == "Unknown":
        return None
    result = "Succeeded" if succeeded.status == "True" else "Cancelled" if succeeded.reason == Reason.CANCELLED else "Failed"
    return result, next((reason for reason in Reason if reason == succeeded.reason), Reason.FAILED)
