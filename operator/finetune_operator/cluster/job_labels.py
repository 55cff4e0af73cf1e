"""What tells jobs apart in metrics."""

from __future__ import annotations

from finetune_operator.cluster.cache import Cache
from finetune_operator.cluster.projection import CachedObject
from finetune_operator.decide.usage_labels import JobLabels


def job_labels(cache: Cache, held: CachedObject) -> tuple[JobLabels, int]:
    """What tells the job of a cached object apart in counters, and the GPUs of one of its training pods."""
    summary = held.summary
    if summary is None:
        return JobLabels(held.key.namespace, held.key.namespace, "", "", "", ""), 0
    cached = cache.profile(summary.profile)
    profile, facts = cached.profile if cached is not None else None, summary.facts
    gpu = profile.gpu if profile is not None else ""
    labels = JobLabels(
        namespace=held.key.namespace,
        team=facts.team or held.key.namespace,
        method=facts.method,
        queue=facts.queue or (profile.queue if profile is not None else ""),
        profile=summary.profile,
        gpu=gpu,
        price=profile.price if profile is not None else "",
    )
    return labels, facts.processes if gpu else 0
