"""Counters and histograms from the accounts of jobs. They have no names of jobs, and survive a restart of the operator.

Every series begins with zero as soon as the first job of its labels exists, because `increase` does not see the first value of
a series.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from finetune_job.reasons import Reason
from finetune_operator.decide.account import OUTCOMES
from finetune_operator.decide.phases import FIRST_STEP, PHASES
from finetune_operator.decide.restart_policy import POLICY, Retry
from finetune_operator.decide.usage_labels import JobLabels
from finetune_operator.decide.usage_totals import SECONDS_BOUNDS, DurationCounts, UsageTotals

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
RESTARTED = tuple(
    (str(failure), "true" if policy.retry is Retry.COUNTED else "false")
    for failure, policy in POLICY.items()
    if policy.retry is not Retry.NEVER
)
"""Failure classes that are followed by a restart, and whether it is counted against `run.maxRestarts`."""
Key = tuple[str, ...]


class UsageCollector(Collector):
    """Collects the usage of jobs. `totals` is called at every scrape."""

    def __init__(self, totals: Callable[[], Mapping[JobLabels, UsageTotals]]) -> None:
        self._totals = totals

    def describe(self) -> Iterable[Metric]:
        """Describe nothing in advance: registering must not read the accounts."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Collect all families, as of now."""
        totals = self._totals()
        yield _ended(totals)
        yield _restarts(totals)
        yield from _gpu_seconds(totals)
        yield _phases(totals)
        yield _first_step(totals)


def _ended(totals: Mapping[JobLabels, UsageTotals]) -> Metric:
    counts: Tally[Key] = Tally()
    for labels, usage in totals.items():
        place = (labels.namespace, labels.team, labels.method, labels.queue, labels.profile)
        counts.update({(*place, result, str(reason)): 0 for result, reason in ENDS})
        counts.update({(*place, *key.split("|")): number for key, number in usage.ended.items()})
    names = ("namespace", "team", "method", "queue", "profile", "result", "reason")
    return _counter("finetune_jobs", "FineTuneJobs that have ended, by result and reason.", names, counts)


def _restarts(totals: Mapping[JobLabels, UsageTotals]) -> Metric:
    counts: Tally[Key] = Tally()
    for labels, usage in totals.items():
        place = (labels.namespace, labels.team)
        counts.update({(*place, *key): 0 for key in RESTARTED})
        counts.update({(*place, *key.split("|")): number for key, number in usage.restarts.items()})
    text = "Restarts of roles after a failure, by its class, and whether they counted against maxRestarts."
    return _counter("finetune_restarts", text, ("namespace", "team", "class", "counted"), counts)


def _gpu_seconds(totals: Mapping[JobLabels, UsageTotals]) -> Iterator[Metric]:
    seconds: dict[Key, float] = {}
    cost: dict[Key, float] = {}
    for labels, usage in totals.items():
        if not labels.gpu:
            continue
        for outcome in OUTCOMES:
            key = (labels.namespace, labels.team, labels.queue, labels.profile, labels.gpu, outcome)
            spent = usage.gpu_seconds.get(outcome, 0.0)
            seconds[key] = seconds.get(key, 0.0) + spent
            if labels.price:
                cost[key] = cost.get(key, 0.0) + spent / 3600 * float(labels.price)
    names = ("namespace", "team", "queue", "profile", "gpu", "outcome")
    text = (
        "GPU seconds that training pods have held: waiting for their start, productive (kept by a checkpoint or a finished "
        "training), or lost. What was trained since the latest checkpoint is not in it yet."
    )
    yield _counter("finetune_gpu_seconds", text, names, seconds)
    yield _counter("finetune_cost", "The same at the profile's gpu.pricePerHour.", names, cost)


def _phases(totals: Mapping[JobLabels, UsageTotals]) -> Metric:
    histograms: dict[Key, DurationCounts] = {}
    for labels, usage in totals.items():
        for phase in PHASES:
            if phase != FIRST_STEP:
                _add(histograms, (labels.namespace, labels.queue, phase), usage.durations.get(phase, DurationCounts()))
    text = "Duration of the phases of jobs that have ended."
    return _histogram("finetune_phase_duration_seconds", text, ("namespace", "queue", "phase"), histograms)


def _first_step(totals: Mapping[JobLabels, UsageTotals]) -> Metric:
    histograms: dict[Key, DurationCounts] = {}
    for labels, usage in totals.items():
        _add(histograms, (labels.namespace, labels.queue), usage.durations.get(FIRST_STEP, DurationCounts()))
    text = "From the start of a job to its first optimizer step, of jobs that have ended."
    return _histogram("finetune_time_to_first_step_seconds", text, ("namespace", "queue"), histograms)


def _add(histograms: dict[Key, DurationCounts], key: Key, more: DurationCounts) -> None:
    before = histograms.get(key, DurationCounts())
    counts = tuple(count + other for count, other in zip(before.counts, more.counts, strict=True))
    histograms[key] = DurationCounts(counts=counts, total=before.total + more.total)


def _counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[Key, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, labels: tuple[str, ...], values: Mapping[Key, DurationCounts]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    bounds = [*(str(float(bound)) for bound in SECONDS_BOUNDS), "+Inf"]
    for key, durations in sorted(values.items()):
        buckets = [(bound, float(sum(durations.counts[: place + 1]))) for place, bound in enumerate(bounds)]
        family.add_metric(key, buckets, durations.total)
    return family
