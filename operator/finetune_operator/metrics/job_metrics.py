"""Gauges of individual jobs, from their status. They exist as long as the FineTuneJob, even after its pods are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from finetune_job.names import Role
from finetune_operator.cache.cache import Cache
from finetune_operator.cache.projection import CachedObject, utc_now
from finetune_operator.decide.gang.gpu_seconds import HeldSeconds, held_seconds

_JOB = ("namespace", "name")
_INFO = ("uid", "team", "queue", "method", "profile", "gpu", "model")
_HELD = ("uid", "team", "queue", "profile", "gpu", "outcome")
_NUMBERS = {
    "progress": ("finetune_job_progress_ratio", "Share of the optimizer steps that are done."),
    "loss": ("finetune_job_loss", "Latest reported training loss."),
    "eval_loss": ("finetune_job_eval_loss", "Latest reported held-out loss."),
    "tokens_per_second": ("finetune_job_tokens_per_second", "Latest reported tokens per second over all ranks."),
    "goodput": ("finetune_job_goodput_ratio", "Share of the time since training began that went into steps that count."),
    "restarts": ("finetune_job_restarts", "Restarts of the gang so far."),
    "memory_estimate": (
        "finetune_job_memory_estimate_bytes",
        "Memory that preflight expects the fullest rank to need: on its device, or in the pod if the rank has no device.",
    ),
}
"""Key in `JobSummary.numbers` -> name and help text of its metric."""
_TIMES = {
    "created": ("finetune_job_created_timestamp_seconds", "When the job was created."),
    "start": ("finetune_job_start_timestamp_seconds", "When its plan was frozen."),
    "completion": ("finetune_job_completion_timestamp_seconds", "When the job and all its pods had ended."),
    "advanced": ("finetune_job_last_step_timestamp_seconds", "When the operator last saw its step change."),
}


class JobLabels(NamedTuple):
    """Labels of a job in metrics."""

    namespace: str
    team: str
    method: str
    queue: str
    profile: str
    gpu: str


def job_labels(cache: Cache, cached: CachedObject) -> tuple[JobLabels, int]:
    """Return the labels of a cached job, and the number of GPUs of one of its training pods."""
    summary = cached.summary
    if summary is None:
        return JobLabels(cached.key.namespace, cached.key.namespace, "", "", "", ""), 0
    cached_profile = cache.profile(summary.profile)
    profile = cached_profile.profile if cached_profile is not None else None
    gpu = profile.gpu if profile is not None else ""
    labels = JobLabels(
        namespace=cached.key.namespace,
        team=summary.team or cached.key.namespace,
        method=summary.method,
        queue=summary.queue or (profile.queue if profile is not None else ""),
        profile=summary.profile,
        gpu=gpu,
    )
    return labels, summary.processes if gpu else 0


class JobCollector(Collector):
    """Collects the gauges of all jobs in the cache at every scrape."""

    def __init__(self, cache: Cache, now: Callable[[], datetime] = utc_now) -> None:
        self._cache = cache
        self._now = now

    def collect(self) -> Iterator[Metric]:
        """Collect all families, as of now."""
        info = GaugeMetricFamily("finetune_job_info", "Properties of a job; always 1.", labels=(*_JOB, *_INFO))
        status = GaugeMetricFamily("finetune_job_status", "Current phase of a job; always 1.", labels=(*_JOB, "state"))
        waiting = GaugeMetricFamily(
            "finetune_job_waiting", "Why a job that has not ended is not running; always 1.", labels=(*_JOB, "reason")
        )
        gpus = GaugeMetricFamily("finetune_job_gpus", "GPUs of the training pods of a job that is placed.", labels=_JOB)
        gpu_seconds = GaugeMetricFamily(
            "finetune_job_gpu_seconds",
            "GPU seconds that the training pods of a job have held so far, by their outcome.",
            labels=(*_JOB, *_HELD),
        )
        numbers = {fact: GaugeMetricFamily(*name_and_help, labels=_JOB) for fact, name_and_help in _NUMBERS.items()}
        times = {fact: GaugeMetricFamily(*name_and_help, labels=_JOB) for fact, name_and_help in _TIMES.items()}
        for cached in sorted(self._cache.jobs(), key=lambda cached: (cached.key.namespace, cached.key.name)):
            summary = cached.summary
            if summary is None:
                continue
            job = (cached.key.namespace, cached.key.name)
            labels, gpus_per_pod = job_labels(self._cache, cached)
            info.add_metric(
                (*job, cached.key.uid, labels.team, labels.queue, labels.method, labels.profile, labels.gpu, summary.model), 1
            )
            status.add_metric((*job, summary.phase), 1)
            ready = next(((value, reason) for kind, value, reason in summary.conditions if kind == "Ready"), ("", ""))
            if ready[0] == "True" and gpus_per_pod and summary.is_training:
                gpus.add_metric(job, gpus_per_pod * summary.nodes)
            elif ready[0] == "False" and not (summary.has_result or summary.is_finished):
                waiting.add_metric((*job, ready[1]), 1)
            if labels.gpu and summary.is_started:
                place = (*job, cached.key.uid, labels.team, labels.queue, labels.profile, labels.gpu)
                for outcome, seconds in self._gpu_seconds(cached, gpus_per_pod).items():
                    gpu_seconds.add_metric((*place, outcome), seconds)
            for fact, value in summary.numbers:
                numbers[fact].add_metric(job, value)
            moments: dict[str, datetime | None] = {
                "created": summary.created,
                "start": summary.start,
                "completion": summary.completion,
                "advanced": summary.advanced,
            }
            for fact, moment in moments.items():
                if moment is not None:
                    times[fact].add_metric(job, moment.timestamp())
        yield from (info, status, waiting, gpus, gpu_seconds, *numbers.values(), *times.values())
        prices = GaugeMetricFamily(
            "finetune_profile_gpu_hour_price", "Price of one GPU for an hour, by profile.", labels=("profile",)
        )
        for cached in sorted(self._cache.profiles(), key=lambda cached: cached.key.name):
            if cached.profile is not None and cached.profile.price:
                prices.add_metric((cached.key.name,), float(cached.profile.price))
        yield prices

    def _gpu_seconds(self, cached: CachedObject, gpus_per_pod: int) -> dict[str, int]:
        """Return the GPU seconds in status, plus those of the current attempt since then. If a pod is dropped from the cache at
        this moment, nothing is returned, because a missing sample is better than one that is too low.
        """
        summary, now = cached.summary, HeldSeconds()
        if summary is None:
            return {}
        waiting, productive, lost = summary.gpu_seconds
        if summary.is_training and not summary.has_result:
            try:
                pods = [child.pod for child in self._cache.pods_of(cached.key.uid) if child.pod is not None]
            except KeyError:
                return {}
            current = [pod for pod in pods if pod.role is Role.TRAIN and pod.attempt == summary.attempt]
            now = held_seconds(current, summary.gpu_seconds_until, self._now(), summary.saved)
        return {
            "waiting": waiting + now.waiting * gpus_per_pod,
            "productive": productive + now.saved * gpus_per_pod,
            "lost": lost,
            "unsaved": now.unsaved * gpus_per_pod,
        }
