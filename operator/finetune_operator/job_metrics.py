"""Gauges of single jobs, from their status. They exist as long as the FineTuneJob, also after its pods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from finetune_operator.cluster.cache import Cache
from finetune_operator.cluster.job_labels import job_labels

_JOB = ("namespace", "name")
_INFO = ("uid", "team", "queue", "method", "profile", "gpu", "model")
_NUMBERS = {
    "progress": ("finetune_job_progress_ratio", "Optimizer steps done, of all."),
    "loss": ("finetune_job_loss", "Loss of the latest step that the operator has heard of."),
    "eval_loss": ("finetune_job_eval_loss", "Held-out loss of the latest evaluation that the operator has heard of."),
    "tokens_per_second": ("finetune_job_tokens_per_second", "Tokens per second over all ranks, as last heard."),
    "goodput": ("finetune_job_goodput_ratio", "Share of the time since training began that went into steps that count."),
    "restarts": ("finetune_job_restarts", "Restarts of the gang so far."),
    "memory_estimate": (
        "finetune_job_memory_estimate_bytes",
        "What preflight expects the fullest rank to need: of its device, or of the pod's memory where there is none.",
    ),
}
"""Fact -> metric and its meaning."""
_TIMES = {
    "created": ("finetune_job_created_timestamp_seconds", "When the job was created."),
    "start": ("finetune_job_start_timestamp_seconds", "When its plan was frozen."),
    "completion": ("finetune_job_completion_timestamp_seconds", "When nothing of it ran any more."),
    "advanced": ("finetune_job_last_step_timestamp_seconds", "When the operator last saw its step change."),
}


class JobCollector(Collector):
    """Collects the gauges of all jobs in the cache at every scrape."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def describe(self) -> Iterable[Metric]:
        """Describe nothing in advance: registering must not read the cache."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Collect all families, as of now."""
        info = GaugeMetricFamily("finetune_job_info", "What is constant in a job; always 1.", labels=(*_JOB, *_INFO))
        status = GaugeMetricFamily("finetune_job_status", "The phase that a job is in; 1.", labels=(*_JOB, "state"))
        waiting = GaugeMetricFamily(
            "finetune_job_waiting", "Why a job that has not ended is not running; 1.", labels=(*_JOB, "reason")
        )
        gpus = GaugeMetricFamily("finetune_job_gpus", "GPUs of the training pods of a job that is placed.", labels=_JOB)
        numbers = {fact: GaugeMetricFamily(*name_and_help, labels=_JOB) for fact, name_and_help in _NUMBERS.items()}
        times = {fact: GaugeMetricFamily(*name_and_help, labels=_JOB) for fact, name_and_help in _TIMES.items()}
        for cached in sorted(self._cache.jobs(), key=lambda cached: (cached.key.namespace, cached.key.name)):
            summary = cached.summary
            if summary is None:
                continue
            job = (cached.key.namespace, cached.key.name)
            labels, gpus_per_pod = job_labels(self._cache, cached)
            facts = summary.facts
            info.add_metric(
                (*job, cached.key.uid, labels.team, labels.queue, labels.method, labels.profile, labels.gpu, facts.model), 1
            )
            status.add_metric((*job, summary.phase), 1)
            ready = next(((value, reason) for kind, value, reason in summary.conditions if kind == "Ready"), ("", ""))
            if ready[0] == "True" and gpus_per_pod and summary.is_training:
                gpus.add_metric(job, gpus_per_pod * facts.nodes)
            elif ready[0] == "False" and not (facts.has_result or summary.is_finished):
                waiting.add_metric((*job, ready[1]), 1)
            for fact, value in facts.numbers:
                numbers[fact].add_metric(job, value)
            moments: dict[str, datetime | None] = {
                "created": summary.created,
                "start": facts.start,
                "completion": facts.completion,
                "advanced": facts.advanced,
            }
            for fact, moment in moments.items():
                if moment is not None:
                    times[fact].add_metric(job, moment.timestamp())
        yield from (info, status, waiting, gpus, *numbers.values(), *times.values())
