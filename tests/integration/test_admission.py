"""A job is no way to what its author may not read: as users with certain rights, on the real API server."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from finetune_job.names import Role
from tests.integration.conftest import CHART, RELEASE, SYSTEM, Installed, OperatorFactory
from tests.integration.kube import Kube, RefusedError
from tests.integration.workload import SPEC, Workload
from tests.support.cases import table
from tests.support.installed_chart import CLUSTER_NAME
from tools.cluster.errors import wait_until

pytestmark = pytest.mark.integration
FETCH = {"hubTokenSecretRef": {"name": "colleagues", "key": "token"}}
JOBS = {"apiGroups": ["finetune.dev"], "resources": ["finetunejobs"], "verbs": ["create", "get", "update", "patch", "delete"]}
USE = {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["use"]}
READ = {**USE, "verbs": ["read"]}
GET = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
DATASETS = [{"source": f"pvc://data/{number}.jsonl"} for number in range(9)]


def user(workload: Workload, name: str, *rules: dict[str, Any], groups: tuple[str, ...] = ()) -> Workload:
    """A user who may make FineTuneJobs, and what `rules` say besides."""
    role = {"metadata": {"name": name}, "rules": [JOBS, *rules]}
    workload.kube.create("Role", workload.namespace, role)
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"}],
    }
    workload.kube.create("RoleBinding", workload.namespace, binding)
    tenant = Workload(workload.kube.acting_as(name, groups), workload.namespace)

    def has_rights() -> bool:
        try:
            tenant.kube.get("FineTuneJob", workload.namespace, "none")
        except RefusedError:
            return False
        return True

    # The API server takes a moment to know them.
    wait_until(has_rights, f"the rights of {name}", 60)
    return tenant


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
            return "you may not use" in str(error)
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
def test_every_field_that_names_a_claim_is_asked_for(workload: Workload) -> None:
    named = {**USE, "resourceNames": ["models", "data", "results", "workspace"]}
    tenant = user(workload, "reader", named)
    theirs = {"source": "pvc://database/x.jsonl"}
    for field, changes in (
        ("spec.model.source", {"model": {"source": "pvc://database/x"}}),
        ("spec.data.source", {"data": theirs}),
        ("spec.data.validation.source", {"data": {"source": "pvc://data/x.jsonl", "validation": theirs}}),
        ("spec.data.datasets[7].source", {"data": {"datasets": [*DATASETS[:7], theirs]}}),
        ("spec.workspace.claimName", {"workspace": {"claimName": "database"}}),
        ("spec.output.destination", {"output": {"destination": "pvc://database/x"}}),
    ):
        assert f"{field}: you may not use the claim database of this namespace" in refusal(tenant, **changes)
    tenant.apply("own")


@pytest.mark.usefixtures("policy_is_asked")
def test_a_claim_that_may_be_read_is_a_source_and_nothing_else(workload: Workload) -> None:
    tenant = user(
        workload, "reader", {**READ, "resourceNames": ["models", "data"]}, {**USE, "resourceNames": ["results", "workspace"]}
    )
    tenant.apply("own")
    said = refusal(tenant, workspace={"claimName": "data"})
    assert "spec.workspace.claimName: you may not use the claim data of this namespace" in said
    assert "ask for the verb use on it" in said
    assert "spec.output.destination" in refusal(tenant, output={"destination": "pvc://models/tuned"})
    stranger = user(workload, "stranger", {**USE, "resourceNames": ["results", "workspace"]})
    assert "ask for the verb read or use on it" in refusal(stranger)


@pytest.mark.usefixtures("policy_is_asked")
def test_a_job_that_names_all_there_is_to_name_can_still_be_judged(workload: Workload) -> None:
    """Asking for a right is dear, and what a policy may cost is limited: beyond that everything is refused."""
    named = [f"data-{number}" for number in range(8)]
    readable = {**READ, "resourceNames": [*named, "models", "held-out"]}
    tenant = user(workload, "everything", readable, {**USE, "resourceNames": ["results", "workspace"]}, GET)
    data = {
        "datasets": [{"source": f"pvc://{name}/x.jsonl"} for name in named],
        "validation": {"source": "pvc://held-out/x.jsonl"},
    }
    fetch = {**FETCH, "s3SecretRef": {"name": "keys"}}
    output = {"destination": "pvc://results/x", "secretRef": {"name": "login"}}
    tenant.apply("all", data=data, fetch=fetch, output=output)


@pytest.fixture
def other_values(installed: Installed, workload: Workload) -> Iterator[Callable[..., None]]:
    """The author's policy with other values of the chart, until the test ends."""

    def apply(*settings: str) -> None:
        values = [argument for setting in settings for argument in ("--set", setting)]
        place = ("--namespace", SYSTEM, "--show-only", "templates/admission.yaml")
        documents = installed.cluster.helm("template", RELEASE, CHART, *place, *values)
        # As helm does it, or its next upgrade would be a conflict.
        manner = ("--server-side", "--force-conflicts", "--field-manager=helm")
        installed.cluster.kubectl("apply", *manner, "-f", "-", input=documents)

    yield apply
    apply()
    late = user(workload, "late", USE)
    wait_until(lambda: accepted(late), "the policy to be what it was", 60)


def accepted(tenant: Workload, **changes: Any) -> bool:
    try:
        tenant.apply("trusted", **changes)
    except RefusedError as error:
        if error.code != 403:
            raise
        return False
    tenant.kube.delete("FineTuneJob", tenant.namespace, "trusted")
    return True


@pytest.mark.usefixtures("policy_is_asked")
def test_who_applies_what_others_have_reviewed_is_trusted_by_name_group_and_namespace(
    workload: Workload, other_values: Callable[..., None]
) -> None:
    by_name, by_group = user(workload, "argocd"), user(workload, "flux", groups=("appliers",))
    stranger = user(workload, "stranger", groups=("others",))
    trusted = ("admission.trustedUsers={argocd}", "admission.trustedGroups={appliers}")
    other_values(*trusted)
    wait_until(lambda: accepted(by_name, fetch=FETCH), "the policy to trust", 60)
    assert accepted(by_group, fetch=FETCH)
    assert not accepted(stranger, fetch=FETCH)
    # Only where a namespace has said so.
    other_values(*trusted, "admission.trustedNamespaceLabel=team.example/gitops")
    wait_until(lambda: not accepted(by_name, fetch=FETCH), "the policy to ask for the label", 60)
    assert not accepted(by_group, fetch=FETCH)
    workload.kube.patch("Namespace", "", workload.namespace, {"metadata": {"labels": {"team.example/gitops": "true"}}})
    wait_until(lambda: accepted(by_name, fetch=FETCH), "the label to be seen", 60)
    assert accepted(by_group, fetch=FETCH)
    assert not accepted(stranger, fetch=FETCH)


@pytest.mark.usefixtures("policy_is_asked")
def test_a_profile_is_given_to_a_namespace_by_a_role_binding(workload: Workload, other_values: Callable[..., None]) -> None:
    tenant = user(workload, "tenant", USE)
    other_values("admission.profileUse=true")
    wait_until(lambda: not accepted(tenant), "the policy to ask for the profile", 60)
    assert "spec.profile: you may not use the FineTuneProfile default in this namespace" in refusal(tenant)
    assert "FineTuneProfile expensive" in refusal(tenant, profile="expensive")
    # Whoever may make pods may mount what pods can mount, and has no more profiles for it.
    assert "spec.profile" in refusal(user(workload, "podmaker", PODS))
    binding = {
        "metadata": {"name": "default-profile"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": f"{CLUSTER_NAME}-profile-default"},
        "subjects": [{"kind": "User", "name": "tenant", "apiGroup": "rbac.authorization.k8s.io"}],
    }
    workload.kube.create("RoleBinding", workload.namespace, binding)
    wait_until(lambda: accepted(tenant), "the binding to be seen", 60)
    assert "FineTuneProfile expensive" in refusal(tenant, profile="expensive")


@pytest.mark.usefixtures("policy_is_asked")
def test_more_data_sets_than_are_asked_for_take_the_right_to_all_claims(workload: Workload) -> None:
    named = {**USE, "resourceNames": ["models", "data", "results", "workspace"]}
    assert "more than 8 of them" in refusal(user(workload, "some", named), data={"datasets": DATASETS})
    user(workload, "all", USE).apply("many", data={"datasets": DATASETS})


@pytest.mark.usefixtures("policy_is_asked")
def test_who_may_make_pods_is_not_kept_from_what_pods_can_mount(workload: Workload) -> None:
    user(workload, "owner", PODS).apply("own", fetch=FETCH)


POD_SETTINGS: dict[str, Any] = table(__file__, "POD_SETTINGS")


@pytest.mark.usefixtures("policy_is_asked")
def test_no_setting_of_a_pod_is_the_tenants(workload: Workload, operator: OperatorFactory) -> None:
    """In any part of the spec: a strict client is told, and of others nothing is stored and nothing comes into the pod."""
    tenant = user(workload, "mallory", USE)
    parts = ("model", "data", "training", "workspace", "output", "run", "preflight", "checkpoint", "parallelism")
    smuggled = {part: {**SPEC.get(part, {}), **POD_SETTINGS} for part in parts}
    for part, content in {**smuggled, **POD_SETTINGS}.items():
        with pytest.raises(RefusedError, match="unknown field"):
            tenant.apply("strict", **{part: content})
    tenant.apply_leniently(**{**smuggled, **POD_SETTINGS})
    stored = workload.job()["spec"]
    found = [(part, name) for part in (*parts, "") for name in POD_SETTINGS if name in (stored.get(part, {}) if part else stored)]
    assert found == []
    operator()
    (made,) = workload.wait_for_pods(Role.PREFLIGHT)
    text = json.dumps({"metadata": made["metadata"].get("labels"), "spec": made["spec"]})
    assert [
        word for word in ("evil", "cluster-admin", "hostPath", "LD_PRELOAD", "database", 'privileged": true') if word in text
    ] == []


@pytest.mark.usefixtures("policy_is_asked")
def test_a_job_names_nothing_outside_its_namespace_and_claims(workload: Workload) -> None:
    """The user is one of whom the policy asks nothing: the schema refuses such names."""
    owner = user(workload, "owner", PODS)
    for changes in table(__file__, "test_a_job_names_nothing_outside_its_namespace_and_claims"):
        with pytest.raises(RefusedError) as refused:
            owner.apply("theft", **changes)
        assert refused.value.code in (400, 422), changes


@pytest.mark.usefixtures("policy_is_asked")
def test_a_tenant_writes_neither_status_nor_what_the_operator_makes(workload: Workload, operator: OperatorFactory) -> None:
    tenant = user(workload, "mallory", USE)
    tenant.apply()
    operator()
    (pod,) = workload.wait_for_pods(Role.PREFLIGHT)
    for kind, name, subresource in (
        ("FineTuneJob", "tune", "status"),
        ("Pod", pod["metadata"]["name"], ""),
        ("Job", workload.batch_jobs(Role.PREFLIGHT)[0]["metadata"]["name"], ""),
        ("ConfigMap", "tune-plan", ""),
    ):
        with pytest.raises(RefusedError) as refused:
            tenant.kube.patch(kind, workload.namespace, name, {"metadata": {"labels": {"a": "b"}}}, subresource)
        assert refused.value.code == 403
    # Forged in the manifest, it is not stored.
    forged = tenant.kube.patch("FineTuneJob", workload.namespace, "tune", {"status": {"phase": "Succeeded"}})
    assert forged["status"].get("phase") != "Succeeded"


@pytest.mark.usefixtures("policy_is_asked")
@pytest.mark.parametrize("label", [{"finetune.dev/job-uid": "any"}, {"app.kubernetes.io/managed-by": "finetune-operator"}])
def test_nobody_who_may_make_pods_or_jobs_takes_part_in_a_run(workload: Workload, label: dict[str, str]) -> None:
    all_of = {"verbs": ["create", "get", "patch"]}
    tenant = user(workload, "mallory", {**PODS, **all_of}, {"apiGroups": ["batch"], "resources": ["jobs"], **all_of})
    container = {"name": "main", "image": "registry.example/own"}
    pod = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    job = {"spec": {"suspend": True, "template": pod}}

    def refused(action: Callable[[], object]) -> str:
        with pytest.raises(RefusedError) as answer:
            action()
        assert answer.value.code == 403
        return str(answer.value)

    kube, namespace = tenant.kube, workload.namespace
    bearing = {"metadata": {"name": "forged", "labels": label}}
    said = refused(lambda: kube.create("Pod", namespace, pod | bearing))
    assert "are for pods that the operator's Jobs make; remove them from this pod" in said
    template = {"metadata": {"labels": label}, **pod}
    forged = {"metadata": {"name": "forged"}, "spec": {"suspend": True, "template": template}}
    assert "remove them from spec.template of this Job" in refused(lambda: kube.create("Job", namespace, forged))
    kube.create("Pod", namespace, pod | {"metadata": {"name": "own", "labels": {"app.kubernetes.io/managed-by": "mallory"}}})
    refused(lambda: kube.patch("Pod", namespace, "own", {"metadata": {"labels": label}}))
    kube.create("Job", namespace, job | {"metadata": {"name": "own", "labels": label}})
    refused(lambda: kube.patch("Job", namespace, "own", {"spec": {"template": {"metadata": {"labels": label}}}}))
    kube.patch("Pod", namespace, "own", {"metadata": {"labels": {"mine": "yes"}}})


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
