"""Labels of the usage counters. Their number is bounded, because users write some of them and each set of labels is kept
forever.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, NamedTuple

from pydantic import StringConstraints

Price = Annotated[str, StringConstraints(pattern=r"^([0-9]+(\.[0-9]+)?)?$")]


class JobLabels(NamedTuple):
    """Labels of the usage counters; the job itself is never one of them."""

    namespace: str
    team: str
    method: str
    queue: str
    profile: str
    gpu: str
    price: Price = ""
    """Price of one GPU for an hour, as the profile had it when the account was opened; empty if it had none."""


MOST_LABELS = 32
"""Most sets of labels of one namespace. Its users write team and queue, and each set has some tens of series forever."""
MOST_IN_ALL = 1000
"""Number of sets of labels in all namespaces beyond which a namespace gets only one more; beyond twice as many, all others
share one."""
OTHER = "other"


def settled_labels(labels: JobLabels, *, has_profile: bool) -> JobLabels:
    """Drop the profile from the labels if it does not exist or has not accepted the job: its name could be any text that a user
    wrote.
    """
    return labels if has_profile else labels._replace(profile=OTHER, gpu="", price="")


def bounded_labels(labels: JobLabels, in_use: Collection[JobLabels], num_in_all: int) -> JobLabels:
    """Return the labels, or those of all other jobs if the namespace or the cluster has too many sets already.

    GPU and price stay, because only administrators write them: inventing teams does not hide the price of GPU hours.

    Args:
        labels: those of a job.
        in_use: those in use in the same namespace.
        num_in_all: how many are in use in all namespaces.
    """
    if labels in in_use or (len(in_use) < MOST_LABELS and num_in_all < MOST_IN_ALL):
        return labels
    others = JobLabels(labels.namespace, OTHER, OTHER, OTHER, OTHER, labels.gpu, labels.price)
    if others in in_use or num_in_all < 2 * MOST_IN_ALL:
        return others
    return JobLabels(OTHER, OTHER, OTHER, OTHER, OTHER, OTHER)
