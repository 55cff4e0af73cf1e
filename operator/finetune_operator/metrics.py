"""Prometheus metrics. What the cache knows is counted at every scrape, so no series outlives its objects; only what happens
in this process (requests, passes) is kept in counters.
"""

from __future__ import annotations

import platform
import re
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from finetune_operator.cluster.api import AnsweredRequest
from finetune_operator.cluster.cache import Cache, JobKey
from finetune_operator.decide.usage_labels import JobLabels
from finetune_operator.decide.usage_totals import UsageTotals
from finetune_operator.health import Health
from finetune_operator.job_metrics import JobCollector
from finetune_operator.usage_metrics import UsageCollector
from finetune_operator.workqueue import WorkQueue

PASS_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Seconds: from a pass without a request to one that is held up by the API server."""
QUEUE_BUCKETS = (0.005, 0.05, 0.25, 1, 2.5, 5, 10, 30, 60, 300)
KNOWN_REASONS = frozenset(
    {
        "AlreadyExists",
        "BadRequest",
        "Conflict",
        "Expired",
        "Forbidden",
        "Gone",
        "InternalError",
        "Invalid",
        "NotFound",
        "RequestEntityTooLarge",
        "ServiceUnavailable",
        "Timeout",
        "TooManyRequests",
        "Unauthorized",
    }
)
"""Reasons that are counted separately: a webhook can answer with any other."""
OTHER_REASON = "other"


class Instruments(Protocol):
    """Receives the measurements of the rest of the operator."""

    def request(self, answered: AnsweredRequest) -> None:
        """One API request was answered."""
        ...

    def reconciled(self, seconds: float, result: str) -> None:
        """One pass ended."""
        ...

    def judged(self, cpu_seconds: float) -> None:
        """One pass read and judged a job."""
        ...

    def found(self, rule: str, severity: str) -> None:
        """A rule or preflight found something, and status says so."""
        ...

    def unreadable(self, kind: str) -> None:
        """Something in an object of that kind could not be read."""
        ...


MOST_RULES = 512
"""Number of ids of findings that are counted separately. Those of preflight come from a pod that may run a tenant's code."""
OTHER_RULES = "other"
_RULE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9/_-]{0,63}")


class Metrics:
    """Counters of this process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        build = Gauge("finetune_build_info", "The operator's version; always 1.", ["version", "python"], registry=self.registry)
        build.labels(_installed_version(), platform.python_version()).set(1)
        self._requests = Counter(
            "finetune_api_requests",
            "Requests to the API server, by verb, resource, HTTP status, and the reason of a refusal.",
            ["verb", "resource", "code", "reason"],
            registry=self.registry,
        )
        self._passes = Histogram(
            "finetune_reconcile_seconds",
            "Duration of reconcile passes, by result.",
            ["result"],
            buckets=PASS_BUCKETS,
            registry=self.registry,
        )
        self._pass_cpu = Histogram(
            "finetune_pass_cpu_seconds",
            "CPU time that reading and judging one job took, which is what a pass holds up the event loop for.",
            buckets=PASS_BUCKETS,
            registry=self.registry,
        )
        self._queue_time = Histogram(
            "finetune_queue_seconds",
            "Time that a job waited in the work queue after its time had come.",
            buckets=QUEUE_BUCKETS,
            registry=self.registry,
        )
        self._loop_lag = Histogram(
            "finetune_loop_lag_seconds",
            "How late the event loop came back to a task that was due.",
            buckets=PASS_BUCKETS,
            registry=self.registry,
        )
        self._failures = Counter(
            "finetune_background_failures",
            "Failures of tasks that run next to the passes, by task; each was started again.",
            ["task"],
            registry=self.registry,
        )
        self._events_dropped = Counter(
            "finetune_events_dropped",
            "Kubernetes Events that were left out because too many waited to be written.",
            registry=self.registry,
        )
        self._findings = Counter(
            "finetune_validation_findings",
            "Findings of rules and preflight, each counted once for each generation of a job.",
            ["rule", "severity"],
            registry=self.registry,
        )
        self._rules: set[str] = set()
        self._unreadable = Counter(
            "finetune_unreadable_objects",
            "Versions of objects that were left out, wholly or in part, because they could not be read.",
            ["kind"],
            registry=self.registry,
        )

    def request(self, answered: AnsweredRequest) -> None:
        """One API request was answered, or got no answer."""
        reason = answered.reason if answered.reason in KNOWN_REASONS or not answered.reason else OTHER_REASON
        self._requests.labels(answered.verb, answered.resource, answered.code, reason).inc()

    def reconciled(self, seconds: float, result: str) -> None:
        """One pass ended."""
        self._passes.labels(result).observe(seconds)

    def judged(self, cpu_seconds: float) -> None:
        """One pass read and judged a job."""
        self._pass_cpu.observe(cpu_seconds)

    def waited(self, seconds: float) -> None:
        """A job was taken from the queue so long after its time had come."""
        self._queue_time.observe(seconds)

    def lagged(self, seconds: float) -> None:
        """The event loop was late."""
        self._loop_lag.observe(seconds)

    def failed(self, task: str) -> None:
        """A task next to the passes failed and is begun again."""
        self._failures.labels(task).inc()

    def event_dropped(self) -> None:
        """A Kubernetes Event was left out."""
        self._events_dropped.inc()

    def found(self, rule: str, severity: str) -> None:
        """A rule or preflight found something, and status says so: counted once for each generation of a job."""
        is_counted_apart = rule in self._rules or (len(self._rules) < MOST_RULES and _RULE_ID.fullmatch(rule) is not None)
        if is_counted_apart:
            self._rules.add(rule)
        self._findings.labels(rule if is_counted_apart else OTHER_RULES, severity).inc()

    def unreadable(self, kind: str) -> None:
        """Something in an object of that kind could not be read."""
        self._unreadable.labels(kind).inc()

    def observe_watches(self, ages: Callable[[], dict[str, float]], num_restarts: Callable[[], int]) -> None:
        """Read these at every scrape."""
        self.registry.register(WatchCollector(ages, num_restarts))

    def observe_state(self, cache: Cache, queue: WorkQueue[JobKey], health: Health) -> None:
        """Count these at every scrape."""
        self.registry.register(StateCollector(cache, queue, health))
        self.registry.register(JobCollector(cache))

    def observe_accounts(self, totals: Callable[[], Mapping[JobLabels, UsageTotals]]) -> None:
        """Read these at every scrape."""
        self.registry.register(UsageCollector(totals))


class WatchCollector(Collector):
    """Collects how old the latest events of the watches are."""

    def __init__(self, ages: Callable[[], dict[str, float]], num_restarts: Callable[[], int]) -> None:
        self._ages = ages
        self._num_restarts = num_restarts

    def describe(self) -> Iterable[Metric]:
        """Describe nothing in advance: registering must not read the watches."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Collect all figures, as of now."""
        ages: dict[tuple[str, ...], float] = {(kind,): seconds for kind, seconds in self._ages().items()}
        yield _gauge("finetune_watch_age_seconds", "Time since an event of this kind came.", ("kind",), ages)
        yield CounterMetricFamily(
            "finetune_watch_restarts", "How often the watches were started again.", value=self._num_restarts()
        )


class StateCollector(Collector):
    """Collects gauges of the current objects."""

    def __init__(self, cache: Cache, queue: WorkQueue[JobKey], health: Health) -> None:
        self._cache = cache
        self._queue = queue
        self._health = health

    def describe(self) -> Iterable[Metric]:
        """Describe nothing in advance: registering must not read the cache."""
        return ()

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
        queue: Tally[tuple[str, ...]] = Tally(
            {("ready",): len(self._queue), ("delayed",): self._queue.num_delayed, ("taken",): self._queue.num_taken}
        )
        yield _gauge("finetune_queue_keys", "Keys in the work queue.", ("state",), queue)
        objects: Tally[tuple[str, ...]] = Tally({(kind,): number for kind, number in self._cache.num_objects().items()})
        yield _gauge("finetune_cached_objects", "Objects in the cache by kind.", ("kind",), objects)
        yield GaugeMetricFamily("finetune_leading", "1 while this replica holds the lease.", value=float(self._health.is_leading))


def _installed_version() -> str:
    try:
        return version("finetune-operator")
    except PackageNotFoundError:
        return "unknown"


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family
