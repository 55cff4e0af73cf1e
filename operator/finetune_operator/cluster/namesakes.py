"""Leftovers of an earlier job of the same name: they have the name of a child, have no living owner, and go away by themselves.

A FineTuneJob that has the name proves that an earlier one of that name is gone. So the garbage collector deletes whatever still
names the earlier one as its controller, whether it is marked for that yet or not.
"""

from __future__ import annotations

from enum import Enum, auto

from finetune_job.names import LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY
from finetune_operator.cluster.kinds import JOBS
from finetune_operator.cluster.object_key import Document, ObjectKey
from finetune_operator.cluster.raw_objects import Fields
from finetune_operator.decide.observed import JobView


class TemplateClaim(Enum):
    """Relation of a claim to the job whose template makes one of that name."""

    USABLE = auto()
    VANISHING = auto()
    """It is being deleted, or will be with the earlier job that owns it."""
    FOREIGN = auto()


def template_claim(key: ObjectKey, claim: Document, job: JobView, *, is_begun: bool = False) -> TemplateClaim:
    """Judge a claim that has the name of the one made from the job's template.

    It goes by labels, because a claim that is kept after its job has no owner, and the next job of that name uses it.
    `is_begun`: the job uses it already, and does so for as long as it exists.
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
    """Whether an object is controlled by an earlier job of that name."""
    return key.is_controlled_by(JOBS) and key.owner_name == job.name and key.owner_uid != job.uid
