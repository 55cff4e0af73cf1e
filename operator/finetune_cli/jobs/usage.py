"""Device hours and their price, from statuses and from the operator's accounts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from finetune_cli.jobs import documents
from finetune_cli.jobs.progress import device_seconds
from finetune_cli.jobs.seen import SeenJob
from finetune_operator.decide.account import LOST, PRODUCTIVE, WAITING
from finetune_operator.decide.usage_labels import JobLabels

UNKNOWN = "-"
"""Text in place of a label that a job does not have."""


@dataclass(frozen=True)
class Usage:
    """Usage of one team, namespace or label."""

    name: str
    gpu_hours: float = 0.0
    productive_hours: float | None = None
    """Hours kept by a checkpoint or a finished training; None: not known separately."""
    jobs: int | None = None
    """Number of jobs; None: not counted."""
    cost: float | None = None
    """Cost in the currency of the profiles' prices; None: no price of any part is known."""


def usage_of_jobs(
    jobs: Iterable[SeenJob], key: Callable[[SeenJob], str], prices: Mapping[str, float | None], now: datetime
) -> list[Usage]:
    """Usage of jobs that still exist.

    `prices`: price of one GPU for an hour by the profile's name; a profile without GPUs is not in it.
    """
    usages: dict[str, Usage] = {}
    for job in jobs:
        if job.profile not in prices:
            continue
        before = usages.get(key(job)) or Usage(key(job), jobs=0)
        hours, price = device_seconds(job, now) / 3600, prices[job.profile]
        cost = before.cost if price is None else (before.cost or 0.0) + hours * price
        usages[key(job)] = Usage(before.name, before.gpu_hours + hours, None, (before.jobs or 0) + 1, cost)
    return _ordered(usages.values())


def usage_of_accounts(
    accounts: Iterable[tuple[JobLabels, Mapping[str, float]]], key: Callable[[JobLabels], str], namespace: str | None
) -> list[Usage]:
    """Usage of all jobs that ever ran, including deleted ones. Each account: labels, and GPU seconds by outcome."""
    usages: dict[str, Usage] = {}
    for labels, seconds in accounts:
        if namespace is not None and labels.namespace != namespace:
            continue
        name = key(labels)
        before = usages.get(name) or Usage(name, productive_hours=0.0)
        hours = sum(seconds.get(outcome, 0.0) for outcome in (WAITING, PRODUCTIVE, LOST)) / 3600
        price = documents.decimal(labels.price)
        cost = before.cost if price is None else (before.cost or 0.0) + hours * price
        kept = (before.productive_hours or 0.0) + seconds.get(PRODUCTIVE, 0.0) / 3600
        usages[name] = Usage(name, before.gpu_hours + hours, kept, None, cost)
    return _ordered(usages.values())


def _ordered(usages: Iterable[Usage]) -> list[Usage]:
    return sorted(usages, key=lambda each: (-each.gpu_hours, each.name))
