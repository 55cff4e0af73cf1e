"""`finetune cost`: GPU hours and their price, by team, namespace, profile or label."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.objects import Cluster, Unseen, unless_refused
from finetune_cli.exit_codes import LocalError
from finetune_cli.jobs import documents
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.seen import SeenJob
from finetune_cli.jobs.usage import UNKNOWN, Usage, usage_of_accounts, usage_of_jobs
from finetune_cli.render.columns import figure, table
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.names import API_VERSION, PROFILE_PLURAL
from finetune_operator.decide.usage_labels import JobLabels

_ACCOUNTS_LABEL = "finetune.dev/accounts=true"
_LABEL = "label:"
_OF_JOBS: dict[str, Callable[[SeenJob], str]] = {
    "team": lambda job: job.team,
    "namespace": lambda job: job.namespace,
    "profile": lambda job: job.profile,
    "method": lambda job: documents.text(job.spec, "method", "type") or UNKNOWN,
}
_OF_ACCOUNTS: dict[str, Callable[[JobLabels], str]] = {
    "team": lambda labels: labels.team,
    "namespace": lambda labels: labels.namespace,
    "profile": lambda labels: labels.profile,
    "method": lambda labels: labels.method,
}


@dataclass(frozen=True)
class Bill:
    """The answer."""

    by: str
    source: str
    """The source of the figures, in words."""
    rows: list[Usage]
    notes: list[str]
    """Notes on what is missing, and why."""


def bill(cluster: Cluster, by: str, now: datetime, *, everywhere: bool) -> Bill:
    """Compute usage from the operator's accounts, or from statuses if those may not be read or have no such label.

    Raises LocalError.
    """
    if by not in _OF_JOBS and not (by.startswith(_LABEL) and len(by) > len(_LABEL)):
        raise LocalError(f"--by: {by!r} is none of {', '.join(_OF_JOBS)} and {_LABEL}KEY; write one of them")
    notes: list[str] = []
    if by in _OF_ACCOUNTS:
        accounts = unless_refused(lambda: _accounts(cluster))
        if not isinstance(accounts, Unseen):
            rows = usage_of_accounts(accounts, _OF_ACCOUNTS[by], None if everywhere else cluster.namespace)
            return Bill(by, "the operator's accounts, deleted jobs included", rows, notes)
        notes.append(f"the operator's accounts were not read: {accounts.reason}")
    prices = unless_refused(lambda: _prices(cluster))
    jobs = cluster.jobs(everywhere=everywhere)
    if isinstance(prices, Unseen):
        notes.append(f"no prices, and hours of CPU ranks count like those of GPUs: {prices.reason}")
        prices = {job.profile: None for job in jobs}
    key = _OF_JOBS.get(by) or (lambda job: job.labels.get(by.removeprefix(_LABEL), UNKNOWN))
    return Bill(by, "the statuses of jobs that still exist", usage_of_jobs(jobs, key, prices, now), notes)


def _accounts(cluster: Cluster) -> list[tuple[JobLabels, Mapping[str, float]]]:
    from finetune_operator.cluster.ledger import read_ledger

    documents_found = cluster.list("v1", "configmaps", "", _ACCOUNTS_LABEL)
    if not documents_found:
        raise ClusterError("there is no ConfigMap of accounts: no operator of this release has counted anything yet")
    found: list[tuple[JobLabels, Mapping[str, float]]] = []
    for document in documents_found:
        try:
            ledger = read_ledger(dict(document))
        except ValueError as error:
            raise ClusterError("the accounts are not those of this release of `finetune`") from error
        found += [(group.labels, group.totals.gpu_seconds) for group in ledger.groups]
        found += [(account.labels, account.gpu_seconds) for account in ledger.jobs.values()]
    return found


def _prices(cluster: Cluster) -> dict[str, float | None]:
    """Price of one GPU for an hour, by name of each profile with GPUs."""
    found: dict[str, float | None] = {}
    for document in cluster.list(API_VERSION, PROFILE_PLURAL, ""):
        try:
            spec = FineTuneProfileSpec.model_validate(documents.value(document, "spec"))
        except ValidationError:
            continue
        if spec.gpu is not None:
            found[documents.text(document, "metadata", "name")] = documents.decimal(spec.gpu.price_per_hour or "")
    return found


def bill_text(bill: Bill) -> str:
    """A row for each, the dearest first, and the sum."""
    rows = [_cells(each) for each in bill.rows]
    total = Usage("all", sum(each.gpu_hours for each in bill.rows), None, None, _total_cost(bill.rows))
    header = (
        bill.by.removeprefix(_LABEL) if bill.by.startswith(_LABEL) else bill.by.upper(),
        "GPU HOURS",
        "KEPT",
        "JOBS",
        "COST",
    )
    notes = "".join(f"note: {plain(each)}\n" for each in bill.notes)
    return table(header, [*rows, _cells(total)]) + f"from {bill.source}\n{notes}"


def _cells(each: Usage) -> tuple[str, ...]:
    kept = None if each.productive_hours is None or not each.gpu_hours else each.productive_hours / each.gpu_hours
    jobs = "-" if each.jobs is None else str(each.jobs)
    return plain(each.name, 60), f"{each.gpu_hours:.2f}", figure(kept, ".0%"), jobs, figure(each.cost, ".2f")


def _total_cost(rows: Sequence[Usage]) -> float | None:
    known = [each.cost for each in rows if each.cost is not None]
    return sum(known) if known else None


def bill_document(bill: Bill) -> dict[str, Any]:
    """The bill as data."""
    return {
        "by": bill.by,
        "source": bill.source,
        "notes": bill.notes,
        "rows": [
            {
                "name": each.name,
                "gpuHours": each.gpu_hours,
                "productiveHours": each.productive_hours,
                "jobs": each.jobs,
                "cost": each.cost,
            }
            for each in bill.rows
        ],
    }
