"""What an earlier job of the same name has left: it has the name of a child, belongs to nobody any more, and goes by itself.

A FineTuneJob that has the name proves that an earlier one of that name is gone. So whatever still names the earlier one as its
controller is deleted by the garbage collector, be it marked for that yet or not.
"""

from __future__ import annotations

from enum import Enum, auto

from finetune_job.names import LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY
from finetune_operator.cluster.kinds import JOBS
from finetune_operator.cluster.object_key import Document, ObjectKey
from finetune_operator.cluster.raw_objects import Fields
from finetune_operator.decide.observed import JobView


class TemplateClaim(Enum):
    """What a claim is to the job whose template makes one of that name."""

    USABLE = auto()
    VANISHING = auto()
    """It is being deleted, or will be with the earlier job that owns it."""
    FOREIGN = auto()


def template_claim(key: ObjectKey, claim: Document, job: JobView, *, is_begun: bool = False) -> TemplateClaim:
    """`claim` has the name of the one that is made from the job's template.

    By its labels, because a claim that is kept after its job has no owner, and the next job of that name takes it. `is_begun`:
    the job works on it already, and does for as long as it is there.
    """
    labels = Fields(claim).at("metadata").at("labels")
    if (labels.name(LABEL_MANAGED_BY), labels.name(LABEL_JOB)) != (MANAGED_BY, job.name):
        return TemplateClaim.FOREIGN
    if is_begun:
        return TemplateClaim.USABLE
    if key.is_deleting or is_of_namesake(key, job):
        return TemplateClaim.VANISHING
    return TemplateClaim.USABLE if key.owner_uid in ("", job.uid) else TemplateClaim.FOREIGN


def is_of_namesake(key: ObjectKey, job: JobView) -> bool:
    """Whether it is controlled by an earlier job of that name."""
    return key.is_controlled_by(JOBS) and key.owner_name == job.name and key.owner_uid != job.uid
