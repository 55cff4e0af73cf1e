"""The chart: what it renders, what it refuses, that it installs, upgrades and stays within its rights."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_job.names import Role
from tests.integration.conftest import CHART, RELEASE, SYSTEM, Installed
from tests.integration.operator_process import OperatorProcess
from tests.integration.workload import Workload
from tests.support.cluster.errors import ClusterError, wait_until

pytestmark = pytest.mark.integration
Document = dict[str, Any]
PUBLISH = {
    "allowedDestinations": ["hf://our-org"],
    "plainHttpRegistries": ["registry.test:5000"],
    "s3Endpoint": "https://store.test",
}


def rendered(installed: Installed, *arguments: str, release: str = RELEASE, namespace: str = SYSTEM) -> list[Document]:
    text = installed.cluster.helm("template", release, CHART, "--namespace", namespace, *arguments)
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def rules_of(documents: list[Document]) -> set[tuple[str, str, str]]:
    """Every (group, resource, verb) that a set of roles grants."""
    return {
        (group, resource, verb)
        for document in documents
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_lint(installed: Installed) -> None:
    assert "0 chart(s) failed" in installed.cluster.helm("lint", "--strict", CHART)


@pytest.mark.parametrize(
    "setting", ["surprise=1", "image.tga=1", "logLevel=loud", "metrics.port=80", "namespaces={Team}", "image.digest=sha256:abc"]
)
def test_wrong_values_are_refused(installed: Installed, setting: str) -> None:
    with pytest.raises(ClusterError, match=setting.split("=", maxsplit=1)[0].rpartition(".")[2]):
        rendered(installed, "--set", setting)


def test_what_kueue_is_told_takes_rights_that_are_given_on_request(installed: Installed) -> None:
    patches = {("batch", "jobs", "patch"), ("kueue.x-k8s.io", "workloads", "patch")}
    for arguments in ([], ["--set", "namespaces={team-a}"]):
        kind = "Role" if arguments else "ClusterRole"
        assert not patches & rules_of(of_kind(rendered(installed, *arguments), kind))
        jobs = rules_of(of_kind(rendered(installed, "--set", "kueue.patchJobs=true", *arguments), kind))
        assert patches & jobs == {("batch", "jobs", "patch")}
        workloads = rules_of(of_kind(rendered(installed, "--set", "kueue.patchWorkloads=true", *arguments), kind))
        assert patches & workloads == {("kueue.x-k8s.io", "workloads", "patch")}


def test_definitions_are_the_generated_ones_and_survive_uninstalling(installed: Installed) -> None:
    crds = of_kind(rendered(installed), "CustomResourceDefinition")
    generated = [yaml.safe_load(path.read_text()) for path in sorted((CHART.parents[1] / "crds").glob("*.yaml"))]
    assert crds == generated
    assert all(crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for crd in crds)
    assert not of_kind(rendered(installed, "--set", "crds.enabled=false"), "CustomResourceDefinition")


def test_operator_reads_no_secrets_and_creates_no_pods(installed: Installed) -> None:
    documents = rendered(installed)
    granted = rules_of([role for role in of_kind(documents, "ClusterRole") if role["metadata"]["name"] == RELEASE])
    assert not [rule for rule in granted if rule[1] == "secrets" or "*" in rule]
    assert {verb for _, resource, verb in granted if resource == "pods"} == {"get", "list", "watch", "delete"}
    assert {verb for _, resource, verb in granted if resource == "finetunejobs"} == {"get", "list", "watch"}


def test_users_roles_leave_the_status_to_the_operator(installed: Installed) -> None:
    roles = [role for role in of_kind(rendered(installed), "ClusterRole") if role["metadata"]["name"] != RELEASE]
    assert {role["metadata"]["name"] for role in roles} == {f"{RELEASE}-edit", f"{RELEASE}-view"}
    assert {resource for _, resource, _ in rules_of(roles)} == {"finetunejobs"}


def test_watching_some_namespaces_gives_rights_in_these_only(installed: Installed) -> None:
    documents = rendered(installed, "--set", "namespaces={a,b}")
    (cluster_role,) = [role for role in of_kind(documents, "ClusterRole") if role["metadata"]["name"] == RELEASE]
    assert {resource for _, resource, _ in rules_of([cluster_role])} == {"finetuneprofiles"}
    roles = [role for role in of_kind(documents, "Role") if role["metadata"]["name"] == RELEASE]
    assert {role["metadata"]["namespace"] for role in roles} == {"a", "b"}
    (deployment,) = of_kind(documents, "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [item for item in arguments if item.startswith("--namespace=")] == ["--namespace=a", "--namespace=b"]


def test_image_by_digest_and_user_id(installed: Installed) -> None:
    digest = "sha256:" + "0" * 64
    (deployment,) = of_kind(rendered(installed, "--set", f"image.digest={digest},runAsUser=1000650000"), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"finetune-operator@{digest}"
    assert pod["securityContext"]["runAsUser"] == 1000650000


def test_deployment_passes_pod_security_restricted(installed: Installed, workload: Workload) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    workload.kube.patch("Namespace", "", workload.namespace, {"metadata": {"labels": labels}})
    (deployment,) = of_kind(rendered(installed), "Deployment")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": deployment["spec"]["template"]["spec"]}
    pod["spec"]["serviceAccountName"] = "default"
    workload.kube.create("Pod", workload.namespace, pod)


def test_install_brought_the_default_profile_and_an_upgrade_changes_it(installed: Installed) -> None:
    profile = installed.kube.get("FineTuneProfile", "", "default")
    assert profile is not None
    assert profile["spec"]["trainerImage"] == "finetune-trainer:0.1.0"
    installed.cluster.helm(
        *("upgrade", RELEASE, CHART, "--namespace", SYSTEM, "--reuse-values"),
        *("--set", "defaultProfile.spec.serviceAccountName=tuner"),
        *("--set-json", f"defaultProfile.spec.publish={json.dumps(PUBLISH)}"),
    )
    changed = installed.kube.get("FineTuneProfile", "", "default")
    assert changed is not None
    assert changed["spec"]["serviceAccountName"] == "tuner"
    assert changed["spec"]["publish"] == PUBLISH
    installed.cluster.helm("upgrade", RELEASE, CHART, "--namespace", SYSTEM, "--reset-values")


def test_rights_in_one_namespace_suffice(installed: Installed, workload: Workload, tmp_path: Path) -> None:
    """The Roles that the chart makes for a namespace, and nothing else, carry a job."""
    release, system = "finetune-operator-one", f"{workload.namespace}-system"
    workload.kube.create("Namespace", "", {"metadata": {"name": system}})
    documents = rendered(
        *(installed, "--set", f"namespaces={{{workload.namespace}}},crds.enabled=false,defaultProfile.create=false"),
        *("--set", "userRoles.create=false"),
        release=release,
        namespace=system,
    )
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    access = [document for document in documents if document["kind"] in kinds]
    installed.cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(access))
    try:
        wait_until(lambda: workload.kube.get("ServiceAccount", system, release), "the ServiceAccount", 60)
        token = installed.cluster.kubectl("create", "token", release, "--namespace", system).strip()
        config = json.loads(installed.operator_kubeconfig.read_text())
        config["users"][0]["user"]["token"] = token
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(json.dumps(config))
        (deployment,) = of_kind(documents, "Deployment")
        own = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        arguments = [argument for argument in own if not argument.startswith("--listen-port")]
        workload.apply()
        operator = OperatorProcess(
            kubeconfig, tmp_path / "operator.log", *arguments, f"--lease-namespace={system}", "--identity=one"
        )
        with operator:
            workload.succeed(Role.PREFLIGHT)
            workload.wait_for_pods(Role.TRAIN)
    finally:
        workload.kube.delete("Namespace", "", system)
