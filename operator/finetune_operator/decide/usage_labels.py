"""What the counters of usage tell jobs apart by, bounded: users write some of it, and each set of labels is kept for good."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, NamedTuple

from pydantic import StringConstraints

Price = Annotated[str, StringConstraints(pattern=r"^([0-9]+(\.[0-9]+)?)?$")]


class JobLabels(NamedTuple):
    """What the counters tell jobs apart by; never the job itself."""

    namespace: str
    team: str
    method: str
    queue: str
    profile: str
    gpu: str
    price: Price = ""
    """Of one GPU for an hour, as the profile had it when the account was opened; empty: none."""


MOST_LABELS = 32
"""Different labels of one namespace. Its users write team and queue, and each of them has some tens of series for good."""
MOST_IN_ALL = 1000
"""Different labels of all namespaces, beyond which a namespace has one set more; with twice as many all others share one."""
OTHER = "other"


def settled_labels(labels: JobLabels, *, has_profile: bool) -> JobLabels:
    """The labels, without a profile that does not exist or has not accepted the job: its name is any text that a user wrote."""
    return labels if has_profile else labels._replace(profile=OTHER, gpu="", price="")


def bounded_labels(labels: JobLabels, in_use: Collection[JobLabels], num_in_all: int) -> JobLabels:
    """The labels, or those of all other jobs of the namespace if it, or the cluster, has too many already.

    GPU and price stay, which only administrators write: nobody loses the price of GPU hours by inventing teams.

    Args:
        labels: of a job.
        in_use: of the same namespace.
        num_in_all: how many are in use in all namespaces.
    """
    if labels in in_use or (len(in_use) < MOST_LABELS and num_in_all < MOST_IN_ALL):
        return labels
    others = JobLabels(labels.namespace, OTHER, OTHER, OTHER, OTHER, labels.gpu, labels.price)
    if others in in_use or num_in_all < 2 * MOST_IN_ALL:
        return others
    return JobLabels(OTHER, OTHER, OTHER, OTHER, OTHER, OTHER)
