"""A job is no way to what its author may not read: as users with certain rights, on the real API server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.conftest import OperatorFactory
from tests.integration.kube import Kube, RefusedError
from tests.integration.workload import Workload
from tests.support.cluster.errors import wait_until

pytestmark = pytest.mark.integration
FETCH = {"hubTokenSecretRef": {"name": "colleagues", "key": "token"}}
JOBS = {"apiGroups": ["finetune.dev"], "resources": ["finetunejobs"], "verbs": ["create", "get", "update", "patch"]}
USE = {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["use"]}
GET = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
DATASETS = [{"source": f"pvc://data/{number}.jsonl"} for number in range(9)]


def user(workload: Workload, name: str, *rules: dict[str, Any]) -> Workload:
    """A user who may make FineTuneJobs, and what `rules` say besides."""
    role = {"metadata": {"name": name}, "rules": [JOBS, *rules]}
    workload.kube.create("Role", workload.namespace, role)
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"}],
    }
    workload.kube.create("RoleBinding", workload.namespace, binding)
    return Workload(workload.kube.acting_as(name), workload.namespace)


def refusal(tenant: Workload, name: str = "theft", **changes: Any) -> str:
    with pytest.raises(RefusedError) as refused:
        tenant.apply(name, **changes)
    assert refused.value.code == 403
    return str(refused.value)


@pytest.fixture
def policy_is_asked(workload: Workload) -> None:
    """The API server takes a moment to know a policy."""
    tenant = user(workload, "early")

    def is_refused() -> bool:
        try:
            tenant.apply("early")
        except RefusedError as error:
            return error.code == 403
        tenant.kube.delete("FineTuneJob", workload.namespace, "early")
        return False

    wait_until(is_refused, "the policy to be asked", 60)


@pytest.mark.usefixtures("policy_is_asked")
def test_who_may_only_make_jobs_reaches_no_claim_and_no_secret(workload: Workload) -> None:
    tenant = user(workload, "mallory")
    assert "spec.workspace.claimName: you may not use the claim workspace of this namespace" in refusal(tenant)
    holder = user(workload, "holder", USE)
    said = refusal(holder, fetch=FETCH)
    assert "spec.fetch.hubTokenSecretRef.name: you may not use the Secret colleagues of this namespace" in said
    assert "name another, or ask for the verb get on it" in said
    assert "spec.fetch.s3SecretRef.name" in refusal(holder, fetch={"s3SecretRef": {"name": "keys"}})
    registry = {"destination": "oci://registry.example/team/model:1", "secretRef": {"name": "login"}}
    assert "spec.output.secretRef.name: you may not use the Secret login" in refusal(holder, output=registry)
    assert holder.apply("honest")["metadata"]["name"] == "honest"


@pytest.mark.usefixtures("policy_is_asked")
@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("spec.model.source", {"model": {"source": "pvc://database/x"}}),
        ("spec.data.source", {"data": {"source": "pvc://database/x.jsonl"}}),
        (
            "spec.data.validation.source",
            {"data": {"source": "pvc://data/x.jsonl", "validation": {"source": "pvc://database/x.jsonl"}}},
        ),
        ("spec.data.datasets[7].source", {"data": {"datasets": [*DATASETS[:7], {"source": "pvc://database/x.jsonl"}]}}),
        ("spec.workspace.claimName", {"workspace": {"claimName": "database"}}),
        ("spec.output.destination", {"output": {"destination": "pvc://database/x"}}),
    ],
)
def test_every_field_that_names_a_claim_is_asked_for(workload: Workload, field: str, changes: dict[str, Any]) -> None:
    named = {**USE, "resourceNames": ["models", "data", "results", "workspace"]}
    tenant = user(workload, "reader", named)
    assert f"{field}: you may not use the claim database of this namespace" in refusal(tenant, **changes)
    tenant.apply("own")


@pytest.mark.usefixtures("policy_is_asked")
def test_more_data_sets_than_are_asked_for_take_the_right_to_all_claims(workload: Workload) -> None:
    named = {**USE, "resourceNames": ["models", "data", "results", "workspace"]}
    assert "more than 8 of them" in refusal(user(workload, "some", named), data={"datasets": DATASETS})
    user(workload, "all", USE).apply("many", data={"datasets": DATASETS})


@pytest.mark.usefixtures("policy_is_asked")
def test_who_may_make_pods_is_not_kept_from_what_pods_can_mount(workload: Workload) -> None:
    user(workload, "owner", PODS).apply("own", fetch=FETCH)


@pytest.mark.usefixtures("policy_is_asked")
def test_a_colleague_can_suspend_a_job_but_not_bend_it(workload: Workload) -> None:
    user(workload, "author", USE, GET).apply("shared", fetch=FETCH)
    colleague: Kube = user(workload, "colleague").kube
    suspended = colleague.patch("FineTuneJob", workload.namespace, "shared", {"spec": {"run": {"suspend": True}}})
    assert suspended["spec"]["run"]["suspend"] is True
    for spec in ({"output": {"destination": "pvc://database/x"}}, {"fetch": {"s3SecretRef": {"name": "keys"}}}):
        with pytest.raises(RefusedError, match="you may not use the"):
            colleague.patch("FineTuneJob", workload.namespace, "shared", {"spec": spec})


def test_a_claim_that_has_the_name_of_a_templates_by_chance_is_not_taken(workload: Workload, operator: OperatorFactory) -> None:
    """The policy cannot ask for it: at admission nobody knows whether the claim is there already."""
    workload.make_claims("tune-workspace")
    workload.apply(workspace={"volumeClaimTemplate": {"storage": "1Gi"}})
    operator()
    stalled = workload.wait_for("Stalled")
    assert (stalled["reason"], "tune-workspace" in stalled["message"]) == ("Conflict", True)
    assert workload.kube.list("Job", workload.namespace) == []
    assert workload.kube.get("ConfigMap", workload.namespace, "tune-plan") is None
    # Another operator knows nothing of what this one has met.
    operator("another")
    assert workload.wait_for("Stalled")["reason"] == "Conflict"
    workload.kube.delete("PersistentVolumeClaim", workload.namespace, "tune-workspace")
    workload.wait(lambda: workload.kube.list("Job", workload.namespace), "preflight once the name is free")
