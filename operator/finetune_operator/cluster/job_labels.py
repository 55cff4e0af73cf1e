"""Labels of jobs in metrics."""

from __future__ import annotations

from finetune_operator.cluster.cache import Cache
from finetune_operator.cluster.projection import CachedObject
from finetune_operator.decide.usage_labels import JobLabels


def job_labels(cache: Cache, cached: CachedObject) -> tuple[JobLabels, int]:
    """Return the labels of a cached job for counters, and the number of GPUs of one of its training pods."""
    summary = cached.summary
    if summary is None:
        return JobLabels(cached.key.namespace, cached.key.namespace, "", "", "", ""), 0
    cached_profile = cache.profile(summary.profile)
    profile, facts = cached_profile.profile if cached_profile is not None else None, summary.facts
    gpu = profile.gpu if profile is not None else ""
    labels = JobLabels(
        namespace=cached.key.namespace,
        team=facts.team or cached.key.namespace,
        method=facts.method,
        queue=facts.queue or (profile.queue if profile is not None else ""),
        profile=summary.profile,
        gpu=gpu,
        price=profile.price if profile is not None else "",
    )
    return labels, facts.processes if gpu else 0
