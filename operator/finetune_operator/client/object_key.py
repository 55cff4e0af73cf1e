"""The identity of an object and of its controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune_job.names import LABEL_JOB_UID, LABEL_MANAGED_BY, MANAGED_BY
from finetune_operator.client.kinds import JOBS, Kind
from finetune_operator.client.raw_objects import Fields

Document = Mapping[str, Any]
LONGEST_UID = 64


class UnreadableObjectError(Exception):
    """An object has no readable UID, name or version."""


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """Identity, version and controller of an object, which the cache uses to find and compare objects."""

    uid: str
    namespace: str
    name: str
    version: int
    """The resourceVersion, which can be compared as a number within one kind."""
    owner_uid: str = ""
    """UID of the controller owner; empty if there is none."""
    owner_kind: str = ""
    owner_group: str = ""
    owner_name: str = ""
    is_deleting: bool = False
    """Whether the object's deletion was requested."""
    is_labelled: bool = True
    """Whether the object has the label by which children are watched; without it, watches send no events about the object."""

    def is_controlled_by(self, kind: Kind) -> bool:
        """Whether, according to its owner reference, the object is controlled by an object of that kind."""
        return bool(self.owner_uid) and self.owner_kind == kind.name and self.owner_group == kind.group


def object_key(document: Document) -> ObjectKey:
    """Read identity, version and controller owner of an object. Raises UnreadableObjectError."""
    return key_of(Fields(document))


def key_of(fields: Fields) -> ObjectKey:
    """Read identity, version and controller owner. Raises UnreadableObjectError."""
    metadata = fields.at("metadata")
    uid, name, version = metadata.name("uid", LONGEST_UID), metadata.name("name"), metadata.digits("resourceVersion")
    if not uid or not name or version is None:
        raise UnreadableObjectError("metadata.uid, metadata.name or metadata.resourceVersion")
    owner = next((item for item in metadata.items("ownerReferences") if item.flag("controller")), Fields(None))
    owner_uid = owner.name("uid", LONGEST_UID)
    return ObjectKey(
        uid=uid,
        namespace=metadata.name("namespace"),
        name=name,
        version=version,
        owner_uid=owner_uid,
        owner_kind=owner.name("kind") if owner_uid else "",
        owner_group=owner.name("apiVersion").rpartition("/")[0] if owner_uid else "",
        owner_name=owner.name("name") if owner_uid else "",
        is_deleting=metadata.has("deletionTimestamp"),
        is_labelled=metadata.at("labels").text(LABEL_MANAGED_BY, 64) == MANAGED_BY,
    )


def belongs_to(document: Document, job_uid: str) -> bool:
    """Whether an object is a child of that job.

    The controller owner decides. A claim that is meant to outlive the job has no owner, and is recognised by its label.
    """
    key = object_key(document)
    if key.owner_uid:
        return key.owner_uid == job_uid and key.is_controlled_by(JOBS)
    is_claim = document.get("kind") == "PersistentVolumeClaim"
    return is_claim and labelled_job_uid(document) == job_uid


def labelled_job_uid(document: Document) -> str:
    """UID of the FineTuneJob according to the object's label, which anybody may write."""
    return Fields(document).at("metadata").at("labels").name(LABEL_JOB_UID, LONGEST_UID)
