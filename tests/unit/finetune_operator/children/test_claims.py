"""Claims: whose word counts, and who may write."""

from typing import Any

import pytest

from finetune_job.api.output import RetainPolicy, VolumeClaimTemplate
from finetune_job.names import Role
from finetune_operator.children.claims import claims_named_by, workspace_claim
from finetune_operator.children.cpu_jobs import cpu_job
from finetune_operator.children.pod_template import claim_access
from finetune_operator.children.train_job import train_job
from tests.support.builders import a_job
from tests.unit.finetune_operator.children.building import OWNER, pod_spec, run_of


@pytest.mark.parametrize(
    ("user", "profile", "chosen"), [("fast", "slow", "fast"), ("fast", None, "fast"), (None, "slow", "slow"), (None, None, None)]
)
def test_the_users_storage_class_comes_before_the_profiles(user: str | None, profile: str | None, chosen: str | None) -> None:
    template = VolumeClaimTemplate(storage="10Gi", storage_class_name=user)
    claim = workspace_claim(OWNER, template, RetainPolicy.KEEP, profile)
    assert claim["spec"].get("storageClassName") == chosen


def read_only(body: dict[str, Any]) -> dict[str, bool]:
    """Claim -> whether its mount is read-only."""
    pod = pod_spec(body)
    claims = {one["name"]: one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"] if "persistentVolumeClaim" in one}
    (container,) = pod["containers"]
    return {claims[mount["name"]]: mount.get("readOnly", False) for mount in container["volumeMounts"] if mount["name"] in claims}


def test_inputs_are_mounted_read_only() -> None:
    run = run_of(a_job())
    assert read_only(cpu_job(run, Role.PREFLIGHT, 0)) == {"models": True, "data": True, "results": False, "scratch": False}
    assert read_only(train_job(run, 0)) == {"models": True, "scratch": False}
    assert read_only(cpu_job(run, Role.MERGE, 0)) == {"models": True, "data": True, "results": False, "scratch": False}


def test_the_claims_of_a_job_are_those_that_its_pods_mount() -> None:
    job = a_job().spec("data.validation", {"source": "pvc://held-out/x.jsonl"})
    mounted = {claim for role in Role for claim in claim_access(job.plan(), role)}
    assert set(claims_named_by(job.parse().spec, "tune")) == mounted


@pytest.mark.parametrize(("retain", "owned"), [(RetainPolicy.KEEP, False), (RetainPolicy.DELETE, True)])
def test_a_workspace_claim_dies_with_its_job_only_where_that_is_asked_for(retain: RetainPolicy, owned: bool) -> None:
    template = VolumeClaimTemplate(storage="10Gi")
    body = workspace_claim(OWNER, template, retain, "fast")
    assert ("ownerReferences" in body["metadata"]) is owned
    assert body["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "10Gi"}},
        "storageClassName": "fast",
    }
    assert "storageClassName" not in workspace_claim(OWNER, template, retain, None)["spec"]
