"""Who an object is, and whose it is."""

from typing import Any

import pytest

from finetune_operator.client.kinds import BATCH_JOBS, JOBS
from finetune_operator.client.object_key import UnreadableObjectError, belongs_to, labelled_job_uid, object_key
from tests.unit.finetune_operator import objects


def test_identity_version_and_owner_are_read() -> None:
    key = object_key(objects.pod(version=12))
    assert (key.uid, key.namespace, key.name, key.version) == ("tune-train-0-0-uid", "team", "tune-train-0-0", 12)
    assert (key.owner_uid, key.owner_kind, key.owner_group, key.owner_name) == (
        "tune-train-0-uid",
        "Job",
        "batch",
        "tune-train-0",
    )
    assert (key.is_deleting, key.is_labelled) == (False, True)
    assert key.is_controlled_by(BATCH_JOBS)
    assert not key.is_controlled_by(JOBS)


def test_an_owner_that_is_not_the_controller_does_not_count() -> None:
    document = objects.batch_job()
    document["metadata"]["ownerReferences"][0]["controller"] = False
    assert object_key(document).owner_uid == ""
    assert not belongs_to(document, "job-uid")


@pytest.mark.parametrize("field", ["uid", "name", "resourceVersion"])
@pytest.mark.parametrize("value", [None, 7, ""])
def test_an_object_without_an_identity_cannot_be_read(field: str, value: Any) -> None:
    document = objects.batch_job()
    document["metadata"][field] = value
    with pytest.raises(UnreadableObjectError, match=r"metadata\.uid, metadata\.name or metadata\.resourceVersion"):
        object_key(document)


def test_only_a_claim_belongs_to_a_job_by_its_label_alone() -> None:
    document = objects.batch_job()
    assert belongs_to(document, "job-uid")
    assert not belongs_to(document, "another-uid")
    del document["metadata"]["ownerReferences"]
    assert labelled_job_uid(document) == "job-uid"
    assert not belongs_to(document, "job-uid")
    assert belongs_to(document | {"kind": "PersistentVolumeClaim"}, "job-uid")
