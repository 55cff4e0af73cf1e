"""Prometheus metrics. What the cache contains is counted at every scrape, so no series outlives its objects; only what happens in
this process (requests, passes) is kept in counters.
"""

from __future__ import annotations

import platform
import re
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from finetune_operator.cache.cache import Cache
from finetune_operator.cache.kopf_watch import Watches
from finetune_operator.client.answers import AnsweredRequest
from finetune_operator.client.kinds import JobKey
from finetune_operator.metrics.health import Health
from finetune_operator.metrics.job_metrics import JobCollector
from finetune_operator.queue.workqueue import WorkQueue

PASS_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Upper bounds in seconds of the buckets for passes: from those without requests to those that the API server holds up."""
QUEUE_BUCKETS = (0.005, 0.05, 0.25, 1, 2.5, 5, 10, 30, 60, 300)
KNOWN_REASONS = (
    *("AlreadyExists", "BadRequest", "Conflict", "Expired", "Forbidden", "Gone", "InternalError", "Invalid"),
    *("NotFound", "RequestEntityTooLarge", "ServiceUnavailable", "Timeout", "TooManyRequests", "Unauthorized"),
)
"""Reasons that are counted separately. All other reasons share one label, because a webhook can answer with any reason."""


MOST_RULES = 512
"""Maximum number of finding ids counted separately. Ids of preflight come from a pod that may run a tenant's code."""
OTHER_RULES = "other"
_RULE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9/_-]{0,63}")


class Metrics:
    """Counters of this process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        build = Gauge("finetune_build_info", "The operator's version; always 1.", ["version", "python"], registry=self.registry)
        try:
            release = version("finetune-operator")
        except PackageNotFoundError:  # The image contains the source packages but no installed distribution.
            release = "unknown"
        build.labels(release, platform.python_version()).set(1)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str, buckets: Sequence[float] = PASS_BUCKETS) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

        text = "Requests to the API server, by verb, resource, HTTP status, and the reason of a refusal."
        self._requests = counter("finetune_api_requests", text, "verb", "resource", "code", "reason")
        self._passes = histogram("finetune_reconcile_seconds", "Duration of reconcile passes, by result.", "result")
        text = "CPU time that reading and judging one job took, which is the time that a pass blocks the event loop."
        self.judged = histogram("finetune_pass_cpu_seconds", text).observe
        text = "Time that a job waited in the work queue after it was due."
        self.waited = histogram("finetune_queue_seconds", text, buckets=QUEUE_BUCKETS).observe
        text = "Delay with which the event loop resumed a task that was due."
        self.lagged = histogram("finetune_loop_lag_seconds", text).observe
        text = "Failures of tasks that run alongside the passes, by task; each was started again."
        self._failures = counter("finetune_background_failures", text, "task")
        text = "Kubernetes Events that were dropped because too many waited, or because the API server did not accept them."
        self.event_dropped = counter("finetune_events_dropped", text).inc
        text = "Findings of rules and preflight, each counted once for each generation of a job."
        self._findings = counter("finetune_validation_findings", text, "rule", "severity")
        self._rules: set[str] = set()
        text = "Versions of objects that were left out, wholly or in part, because they could not be read."
        self._unreadable = counter("finetune_unreadable_objects", text, "kind")

    def request(self, answered: AnsweredRequest) -> None:
        """Count an API request, whether it was answered or not."""
        reason = answered.reason if answered.reason in KNOWN_REASONS or not answered.reason else "other"
        self._requests.labels(answered.verb, answered.resource, answered.code, reason).inc()

    def reconciled(self, seconds: float, result: str) -> None:
        """Count a pass that has ended."""
        self._passes.labels(result).observe(seconds)

    def failed(self, task: str) -> None:
        """Count a failure of a background task, which is then restarted."""
        self._failures.labels(task).inc()

    def found(self, rule: str, severity: str) -> None:
        """Count a finding of a rule or of preflight that is now in status. Call this once for each generation of a job."""
        is_counted_apart = rule in self._rules or (len(self._rules) < MOST_RULES and _RULE_ID.fullmatch(rule) is not None)
        if is_counted_apart:
            self._rules.add(rule)
        self._findings.labels(rule if is_counted_apart else OTHER_RULES, severity).inc()

    def unreadable(self, kind: str) -> None:
        """Count an object of that kind that has an unreadable value."""
        self._unreadable.labels(kind).inc()

    def observe_state(self, cache: Cache, queue: WorkQueue[JobKey], health: Health, watches: Watches) -> None:
        """Have the state of these objects, and of all jobs, collected at every scrape."""
        self.registry.register(StateCollector(cache, queue, health, watches))
        self.registry.register(JobCollector(cache))


class StateCollector(Collector):
    """Collects gauges of the cached objects, the queue, the watches and the lease."""

    def __init__(self, cache: Cache, queue: WorkQueue[JobKey], health: Health, watches: Watches) -> None:
        self._cache = cache
        self._queue = queue
        self._health = health
        self._watches = watches

    def collect(self) -> Iterator[Metric]:
        """Collect all gauges, as of now."""
        phases: Tally[tuple[str, ...]] = Tally()
        conditions: Tally[tuple[str, ...]] = Tally()
        attempts: Tally[tuple[str, ...]] = Tally()
        failures: Tally[tuple[str, ...]] = Tally()
        for cached in self._cache.jobs():
            if cached.summary is None:
                continue
            phases[cached.key.namespace, cached.summary.phase] += 1
            for kind, status, reason in cached.summary.conditions:
                conditions[kind, status, reason] += 1
            for outcome, failure, counted in cached.summary.outcomes:
                attempts[outcome,] += 1
                if failure:
                    failures[failure, "true" if counted else "false"] += 1
        yield _gauge("finetune_jobs", "FineTuneJobs by phase.", ("namespace", "phase"), phases)
        yield _gauge("finetune_job_conditions", "FineTuneJobs by condition.", ("condition", "status", "reason"), conditions)
        yield _gauge("finetune_attempts", "Recorded attempts of existing jobs, of all roles, by outcome.", ("outcome",), attempts)
        yield _gauge(
            "finetune_attempt_failures",
            "Failed attempts of existing jobs, of all roles, by class, and whether they counted against maxRestarts.",
            ("class", "counted"),
            failures,
        )
        queue = {("ready",): len(self._queue), ("delayed",): self._queue.num_delayed, ("taken",): self._queue.num_taken}
        yield _gauge("finetune_queue_keys", "Keys in the work queue.", ("state",), queue)
        objects = {(kind,): number for kind, number in self._cache.num_objects().items()}
        yield _gauge("finetune_cached_objects", "Objects in the cache by kind.", ("kind",), objects)
        ages = {(kind,): seconds for kind, seconds in self._watches.ages().items()}
        yield _gauge("finetune_watch_age_seconds", "Time since the last watch event of this kind.", ("kind",), ages)
        yield CounterMetricFamily(
            "finetune_watch_restarts", "How often the watches were started again.", value=self._watches.num_restarts
        )
        yield GaugeMetricFamily("finetune_leading", "1 while this replica holds the lease.", value=float(self._health.is_leading))


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family
