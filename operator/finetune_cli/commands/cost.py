"""`finetune cost`: GPU hours and their price, by team, namespace, profile or label."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from finetune_cli.cluster.objects import Cluster, Unseen, unless_refused
from finetune_cli.exit_codes import LocalError
from finetune_cli.jobs import documents
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.profiles import read_profile
from finetune_cli.jobs.progress import device_seconds
from finetune_cli.jobs.seen import SeenJob
from finetune_cli.render.columns import figure, table
from finetune_job.names import API_VERSION, PROFILE_PLURAL

UNKNOWN = "-"
"""Shown in place of a label or method that a job does not have."""
_LABEL = "label:"
_OF_JOBS: dict[str, Callable[[SeenJob], str]] = {
    "team": lambda job: job.team,
    "namespace": lambda job: job.namespace,
    "profile": lambda job: job.profile,
    "method": lambda job: documents.text(job.spec, "method", "type") or UNKNOWN,
}
_SOURCE = "of the jobs that exist; Prometheus also has those of deleted jobs\n"


@dataclass(frozen=True)
class Usage:
    """Usage of one team, namespace or label."""

    name: str
    gpu_hours: float = 0.0
    productive_hours: float | None = None
    """GPU hours whose work was kept by a checkpoint or by finished training; None: no attempt of these jobs has ended."""
    jobs: int | None = None
    """Number of jobs; None: not counted."""
    cost: float | None = None
    """Cost in the currency of the profiles' prices; None: no price is known."""


def usage_of_jobs(
    jobs: Iterable[SeenJob], key: Callable[[SeenJob], str], prices: Mapping[str, float | None], now: datetime
) -> list[Usage]:
    """Add up the usage of jobs for each `key`, the largest first.

    `prices`: name of the profile -> price of one GPU for an hour. Jobs of other profiles, such as those without GPUs, are left
    out.
    """
    usages: dict[str, Usage] = {}
    for job in jobs:
        if job.profile not in prices:
            continue
        before = usages.get(key(job)) or Usage(key(job), jobs=0)
        hours, price, counted = device_seconds(job, now) / 3600, prices[job.profile], job.status.gpu_seconds
        cost = before.cost if price is None else (before.cost or 0.0) + hours * price
        kept = before.productive_hours if counted is None else (before.productive_hours or 0.0) + counted.productive / 3600
        usages[key(job)] = Usage(before.name, before.gpu_hours + hours, kept, (before.jobs or 0) + 1, cost)
    return sorted(usages.values(), key=lambda each: (-each.gpu_hours, each.name))


@dataclass(frozen=True)
class Bill:
    """Usage by team, namespace, profile, method or label."""

    by: str
    rows: list[Usage]
    notes: list[str]
    """Notes on what is missing, and why."""


def bill(cluster: Cluster, by: str, now: datetime, *, everywhere: bool) -> Bill:
    """Compute usage from the statuses of the jobs that exist. Raises LocalError."""
    if by not in _OF_JOBS and not (by.startswith(_LABEL) and len(by) > len(_LABEL)):
        raise LocalError(f"--by: {by!r} is none of {', '.join(_OF_JOBS)} and {_LABEL}KEY; write one of them")
    notes: list[str] = []
    prices = unless_refused(lambda: _prices(cluster, notes))
    jobs = cluster.jobs(everywhere=everywhere)
    if isinstance(prices, Unseen):
        notes.append(f"no prices, and hours of CPU ranks count like those of GPUs: {prices.reason}")
        prices = {job.profile: None for job in jobs}
    key = _OF_JOBS.get(by) or (lambda job: job.labels.get(by.removeprefix(_LABEL), UNKNOWN))
    return Bill(by, usage_of_jobs(jobs, key, prices, now), notes)


def _prices(cluster: Cluster, notes: list[str]) -> dict[str, float | None]:
    """Return the hourly price of one GPU for each profile with GPUs, by name. Add a note about each unreadable profile."""
    prices: dict[str, float | None] = {}
    for document in cluster.list(API_VERSION, PROFILE_PLURAL, ""):
        name, spec = documents.text(document, "metadata", "name"), read_profile(documents.value(document, "spec"))
        if isinstance(spec, str):
            notes.append(f"jobs of the profile {name} are left out, because this release cannot read it: {spec}")
        elif spec.gpu is not None:
            prices[name] = documents.decimal(spec.gpu.price_per_hour or "")
    return prices


def bill_text(bill: Bill) -> str:
    """Return a table of the bill's rows, in their order, followed by the total."""
    rows = [_cells(row) for row in bill.rows]
    costs = [row.cost for row in bill.rows if row.cost is not None]
    total = Usage("all", sum(row.gpu_hours for row in bill.rows), None, None, sum(costs) if costs else None)
    subject = bill.by.removeprefix(_LABEL) if bill.by.startswith(_LABEL) else bill.by.upper()
    notes = "".join(f"note: {plain(note)}\n" for note in bill.notes)
    header = (subject, "GPU HOURS", "KEPT", "JOBS", "COST")
    return table(header, [*rows, _cells(total)]) + _SOURCE + notes


def _cells(each: Usage) -> tuple[str, ...]:
    kept = None if each.productive_hours is None or not each.gpu_hours else each.productive_hours / each.gpu_hours
    jobs = "-" if each.jobs is None else str(each.jobs)
    return plain(each.name, 60), f"{each.gpu_hours:.2f}", figure(kept, ".0%"), jobs, figure(each.cost, ".2f")


def bill_document(bill: Bill) -> dict[str, Any]:
    """Return the bill as data."""
    return {
        "by": bill.by,
        "notes": bill.notes,
        "rows": [
            {
                "name": row.name,
                "gpuHours": row.gpu_hours,
                "productiveHours": row.productive_hours,
                "jobs": row.jobs,
                "cost": row.cost,
            }
            for row in bill.rows
        ],
    }
