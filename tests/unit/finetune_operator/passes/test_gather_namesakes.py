"""Whose a claim is that has the name of a template's, and what an earlier job of the same name has left."""

from typing import Any

import pytest

from finetune_operator.client.object_key import object_key
from finetune_operator.decide.seen.observed import JobView
from finetune_operator.passes.gather import TemplateClaim, is_of_namesake, template_claim
from tests.unit.finetune_operator import objects

JOB = JobView("team", "tune", "job-uid", 1, "1", None)
OURS = {"app.kubernetes.io/managed-by": "finetune-operator", "finetune.dev/job": "tune", "finetune.dev/job-uid": "first-uid"}


def claim(owner: dict[str, Any] | None = None, labels: dict[str, str] | None = None, **metadata: Any) -> dict[str, Any]:
    owners = [] if owner is None else [owner]
    labels = OURS if labels is None else labels
    return {"metadata": objects.metadata("tune-workspace", "claim-uid", labels=labels, ownerReferences=owners, **metadata)}


def owned(name: str, uid: str, kind: str = "FineTuneJob", api_version: str = "finetune.dev/v1alpha1") -> dict[str, Any]:
    return objects.owner(kind, name, uid, api_version)


DELETING = {"deletionTimestamp": objects.CREATED}
USABLE, VANISHING, FOREIGN = TemplateClaim.USABLE, TemplateClaim.VANISHING, TemplateClaim.FOREIGN


@pytest.mark.parametrize(
    ("document", "before", "begun"),
    [
        (claim(), USABLE, USABLE),
        (claim(owned("tune", "job-uid")), USABLE, USABLE),
        (claim(owned("tune", "first-uid")), VANISHING, USABLE),
        (claim(owned("tune", "first-uid"), **DELETING), VANISHING, USABLE),
        (claim(owned("tune", "job-uid"), **DELETING), VANISHING, USABLE),
        (claim(**DELETING), VANISHING, USABLE),
        (claim(owned("another", "first-uid")), FOREIGN, USABLE),
        (claim(owned("tune", "set-uid", "StatefulSet", "apps/v1")), FOREIGN, USABLE),
        (claim(labels={}), FOREIGN, FOREIGN),
        (claim(labels=OURS | {"finetune.dev/job": "another"}), FOREIGN, FOREIGN),
        (claim(labels=OURS | {"app.kubernetes.io/managed-by": "helm"}, **DELETING), FOREIGN, FOREIGN),
    ],
)
def test_template_claim_is_used_only_if_it_stays(document: dict[str, Any], before: TemplateClaim, begun: TemplateClaim) -> None:
    key = object_key(document)
    assert template_claim(key, document, JOB) is before
    assert template_claim(key, document, JOB, is_begun=True) is begun


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        (None, False),
        (owned("tune", "first-uid"), True),
        (owned("tune", "job-uid"), False),
        (owned("another", "first-uid"), False),
        (owned("tune", "first-uid", "Job", "batch/v1"), False),
        (owned("tune", "first-uid", api_version="other.example/v1"), False),
    ],
)
def test_what_names_an_earlier_job_of_the_name_as_its_controller_is_a_namesakes(
    owner: dict[str, Any] | None, expected: bool
) -> None:
    assert is_of_namesake(object_key(claim(owner)), JOB) is expected
