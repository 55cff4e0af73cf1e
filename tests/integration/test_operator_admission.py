"""What the operator's own account may write: on the real API server, with its token, beyond what RBAC says of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from finetune_job.names import Role
from tests.integration.conftest import CHART, RELEASE, SYSTEM, Installed, OperatorFactory
from tests.integration.kube import Document, Kube, RefusedError
from tests.integration.workload import Workload
from tests.support.installed_chart import WAYS_OUT
from tools.cluster.errors import wait_until

pytestmark = pytest.mark.integration
Change = Callable[[Document], Any]
SERVER_FIELDS = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields")
CREDENTIALS = {"hubTokenSecretRef": {"name": "hub", "key": "token"}}


@pytest.fixture
def as_operator(installed: Installed, workload: Workload) -> Kube:
    """The operator's token, once the API server asks the policies."""
    kube = Kube(installed.operator_kubeconfig)
    stray = {"metadata": {"name": "early"}}
    wait_until(lambda: "no FineTuneJob controls" in refused(kube, "ConfigMap", workload, stray), "the policies to be asked", 60)
    return kube


def refused(kube: Kube, kind: str, workload: Workload, body: Document) -> str:
    """What the server says to a dry run of creating it; empty if it would be created."""
    try:
        kube.request("POST", kube.path(kind, workload.namespace) + "?dryRun=All", body)
    except RefusedError as refusal:
        if refusal.code != 403:
            raise
        return str(refusal)
    return ""


def written_again(document: Document) -> Document:
    """A child as the operator made it, under another name."""
    body = copy.deepcopy(document)
    body.pop("status", None)
    metadata = body["metadata"]
    for field in SERVER_FIELDS:
        metadata.pop(field, None)
    metadata["name"] += "-2"
    if "template" in body["spec"]:
        body["spec"].pop("selector")
        for label in ("controller-uid", "job-name"):
            for prefix in ("", "batch.kubernetes.io/"):
                body["spec"]["template"]["metadata"]["labels"].pop(prefix + label, None)
    return body


@pytest.fixture
def fetch_job(workload: Workload, operator: OperatorFactory) -> Document:
    """A Job that the operator made: with credentials, and so with all kinds of volumes."""
    workload.apply(model={"source": "hf://org/base", "revision": "a" * 40}, fetch=CREDENTIALS)
    operator()
    workload.wait_for_pods(Role.FETCH)
    (job,) = workload.batch_jobs(Role.FETCH)
    return written_again(job)


def pod(change: Change) -> Change:
    return lambda job: change(job["spec"]["template"]["spec"])


def container(**changes: Any) -> Change:
    return pod(lambda spec: spec["containers"][0].update(changes))


def security(**changes: Any) -> Change:
    return pod(lambda spec: spec["containers"][0]["securityContext"].update(changes))


def volume(**source: Any) -> Change:
    return pod(lambda spec: spec["volumes"].append({"name": "more", **source}))


def without(name: str) -> Change:
    return pod(lambda spec: spec["securityContext"].pop(name))


TOKEN = {"serviceAccountToken": {"path": "token"}}
IDLE = {"exec": {"command": ["true"]}}
FORBIDDEN: dict[str, tuple[Change, str]] = {
    "owner": (lambda job: job["metadata"].pop("ownerReferences"), "no FineTuneJob controls it"),
    "another owner": (
        lambda job: job["metadata"]["ownerReferences"][0].update(kind="ConfigMap", apiVersion="v1"),
        "no FineTuneJob",
    ),
    "a profile as owner": (lambda job: job["metadata"]["ownerReferences"][0].update(kind="FineTuneProfile"), "no FineTuneJob"),
    "no controller": (lambda job: job["metadata"]["ownerReferences"][0].update(controller=False), "no FineTuneJob controls it"),
    "token": (pod(lambda spec: spec.update(automountServiceAccountToken=True)), "have no token"),
    "token by default": (pod(lambda spec: spec.pop("automountServiceAccountToken")), "have no token"),
    "projected token": (volume(projected={"sources": [TOKEN]}), "projected without tokens"),
    "node's files": (volume(hostPath={"path": "/"}), "Volumes of the operator's Jobs are"),
    "network": (pod(lambda spec: spec.update(hostNetwork=True)), "share no namespace with their node"),
    "processes": (pod(lambda spec: spec.update(hostPID=True)), "share no namespace with their node"),
    "shared memory": (pod(lambda spec: spec.update(hostIPC=True)), "share no namespace with their node"),
    "root": (without("runAsNonRoot"), "set runAsNonRoot"),
    "user 0": (pod(lambda spec: spec["securityContext"].update(runAsUser=0)), "set runAsNonRoot"),
    "no seccomp": (without("seccompProfile"), "a seccompProfile"),
    "root container": (security(runAsNonRoot=False), "are restricted"),
    "container of user 0": (security(runAsUser=0), "are restricted"),
    "unconfined": (security(seccompProfile={"type": "Unconfined"}), "are restricted"),
    "privileged": (security(privileged=True, allowPrivilegeEscalation=True), "are restricted"),
    "escalation": (security(allowPrivilegeEscalation=True), "are restricted"),
    "all capabilities": (security(capabilities={}), "are restricted"),
    "a capability": (security(capabilities={"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}), "are restricted"),
    "writable root": (security(readOnlyRootFilesystem=False), "are restricted"),
    "port of the node": (container(ports=[{"containerPort": 80, "hostPort": 80}]), "are restricted"),
    "first container": (
        pod(lambda spec: spec.update(initContainers=[{"name": "first", "image": "finetune-trainer"}])),
        "are restricted",
    ),
    "command": (container(command=["sh"]), "set no command"),
    "lifecycle": (container(lifecycle={"preStop": IDLE}), "set no command"),
    "environment": (container(envFrom=[{"secretRef": {"name": "database"}}]), "set no command"),
    "image": (container(image="registry.evil/finetune-trainer:0.1.0"), "registry.evil/finetune-trainer:0.1.0 is not one of "),
    "image of a longer name": (container(image="finetune-trainer-2:0.1.0"), "add its beginning to admission.operator.images"),
}


def test_each_job_that_no_run_needs_is_refused(as_operator: Kube, workload: Workload, fetch_job: Document) -> None:
    assert refused(as_operator, "Job", workload, fetch_job) == ""
    said = {}
    for name, (change, _) in FORBIDDEN.items():
        body = copy.deepcopy(fetch_job)
        change(body)
        said[name] = refused(as_operator, "Job", workload, body)
        # The policy speaks of the operator alone.
        assert refused(workload.kube, "Job", workload, body) == ""
    assert {name: text for name, text in said.items() if FORBIDDEN[name][1] not in text} == {}
    again = copy.deepcopy(fetch_job)
    container(image="finetune-trainer@sha256:" + "0" * 64)(again)
    assert refused(as_operator, "Job", workload, again) == ""


def test_images_by_tag_are_refused_if_the_chart_asks_for_digests(
    as_operator: Kube, installed: Installed, workload: Workload, fetch_job: Document
) -> None:
    by_digest = copy.deepcopy(fetch_job)
    container(image="finetune-trainer@sha256:" + "0" * 64)(by_digest)

    def apply(*settings: str) -> None:
        place = ("--namespace", SYSTEM, "--show-only", "templates/admission-operator.yaml")
        documents = installed.cluster.helm("template", RELEASE, CHART, *place, "--set", ",".join((*WAYS_OUT, *settings)))
        # As helm does it, or its next upgrade would be a conflict.
        manner = ("--server-side", "--force-conflicts", "--field-manager=helm")
        installed.cluster.kubectl("apply", *manner, "-f", "-", input=documents)

    def said() -> str:
        return refused(as_operator, "Job", workload, fetch_job)

    apply("admission.operator.requireDigest=true")
    try:
        wait_until(
            lambda: "named by digest (admission.operator.requireDigest of its chart)" in said(), "digests to be asked for", 60
        )
        assert refused(as_operator, "Job", workload, by_digest) == ""
    finally:
        apply()
        wait_until(lambda: said() == "", "the policy to be what it was", 60)


def test_only_what_a_job_controls_is_made(as_operator: Kube, workload: Workload, fetch_job: Document) -> None:
    owners = fetch_job["metadata"]["ownerReferences"]
    uid = owners[0]["uid"]
    owned = {"name": "more", "ownerReferences": owners}
    headless = {"clusterIP": "None", "ports": [{"port": 80}], "selector": {"finetune.dev/job-uid": uid}}
    run = {"podSelector": {"matchLabels": {"finetune.dev/job-uid": uid}}}
    empty = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    labelled = {"name": "more", "labels": {"finetune.dev/job-uid": uid}}
    snapshot = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "database"}
    about = {"kind": "FineTuneJob", "apiVersion": "finetune.dev/v1alpha1", "name": "tune", "namespace": workload.namespace}
    pod_of_a_colleague = {**about, "kind": "Pod", "apiVersion": "v1"}
    cases: list[tuple[str, Document, str]] = [
        ("ConfigMap", {"metadata": owned}, ""),
        ("ConfigMap", {"metadata": {"name": "more"}}, "no FineTuneJob controls it"),
        ("Service", {"metadata": owned, "spec": headless}, ""),
        ("Service", {"metadata": {"name": "more"}, "spec": headless}, "no FineTuneJob controls it"),
        ("Service", {"metadata": owned, "spec": {**headless, "clusterIP": ""}}, "its Services are headless"),
        ("Service", {"metadata": owned, "spec": {**headless, "externalIPs": ["192.0.2.1"]}}, "its Services are headless"),
        (
            "Service",
            {"metadata": owned, "spec": {**headless, "selector": {"app": "database"}}},
            "select the pods of their FineTuneJob",
        ),
        ("NetworkPolicy", {"metadata": owned, "spec": run}, ""),
        ("NetworkPolicy", {"metadata": {"name": "more"}, "spec": run}, "no FineTuneJob controls it"),
        ("NetworkPolicy", {"metadata": owned, "spec": {"podSelector": {}}}, "select the pods of their FineTuneJob"),
        ("PersistentVolumeClaim", {"metadata": labelled, "spec": empty}, ""),
        ("PersistentVolumeClaim", {"metadata": {"name": "more"}, "spec": empty}, "new and empty workspace claims"),
        ("PersistentVolumeClaim", {"metadata": labelled, "spec": {**empty, "volumeName": "database"}}, "new and empty"),
        ("PersistentVolumeClaim", {"metadata": labelled, "spec": {**empty, "dataSource": snapshot}}, "new and empty"),
        ("Event", {"metadata": {"name": "more"}, "involvedObject": about}, ""),
        ("Event", {"metadata": {"name": "more"}, "involvedObject": pod_of_a_colleague}, "its events are about FineTuneJobs"),
    ]
    wrong = [(kind, body, expected, refused(as_operator, kind, workload, body)) for kind, body, expected in cases]
    assert [case for case in wrong if (case[2] not in case[3] if case[2] else case[3])] == []


def test_only_what_a_job_controls_is_deleted(as_operator: Kube, workload: Workload, fetch_job: Document) -> None:
    """RBAC would let it: the operator may delete Jobs, ConfigMaps, Services and pods of every served namespace."""
    spec = {"containers": [{"name": "main", "image": "app"}]}
    template = {"spec": {**spec, "restartPolicy": "Never"}}
    strangers: list[tuple[str, Document]] = [
        ("ConfigMap", {}),
        ("Service", {"spec": {"clusterIP": "None", "ports": [{"port": 80}]}}),
        ("Job", {"spec": {"template": template}}),
        ("Pod", {"spec": spec}),
    ]
    for kind, body in strangers:
        workload.kube.create(kind, workload.namespace, {"metadata": {"name": "strangers"}, **body})
        with pytest.raises(RefusedError, match=r"The operator may not delete \w+/strangers") as refusal:
            as_operator.delete(kind, workload.namespace, "strangers")
        assert refusal.value.code == 403
        assert workload.kube.get(kind, workload.namespace, "strangers") is not None
    # Somebody took the label off: the pod is a run's all the same.
    (pod_of_the_run,) = workload.pods(Role.FETCH)
    name = pod_of_the_run["metadata"]["name"]
    workload.kube.patch("Pod", workload.namespace, name, {"metadata": {"labels": {"finetune.dev/job-uid": None}}})
    as_operator.delete("Pod", workload.namespace, name)
    for kind, own in (("ConfigMap", "tune-plan"), ("Job", fetch_job["metadata"]["name"].removesuffix("-2"))):
        as_operator.delete(kind, workload.namespace, own)


def test_a_pod_is_never_changed(as_operator: Kube, workload: Workload, fetch_job: Document) -> None:
    """Who may patch a pod may give it another image."""
    (pod_of_the_run,) = workload.pods(Role.FETCH)
    for metadata in ({"labels": {"finetune.dev/attempt": "1"}}, {"annotations": {"color": "blue"}}):
        with pytest.raises(RefusedError) as refusal:
            as_operator.patch("Pod", workload.namespace, pod_of_the_run["metadata"]["name"], {"metadata": metadata})
        assert refusal.value.code == 403


def test_leases_and_profiles_are_those_of_the_release(as_operator: Kube, installed: Installed) -> None:
    lease = {"metadata": {"name": "kube-scheduler"}}
    with pytest.raises(RefusedError, match="The operator may not create leases/kube-scheduler: it has one Lease"):
        as_operator.request("POST", as_operator.path("Lease", SYSTEM) + "?dryRun=All", lease)
    installed.kube.delete("Lease", SYSTEM, RELEASE)
    as_operator.request("POST", as_operator.path("Lease", SYSTEM) + "?dryRun=All", {"metadata": {"name": RELEASE}})
    profile = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneProfile",
        "metadata": {"name": "free-for-all"},
        "spec": {"trainerImage": "x"},
    }
    with pytest.raises(RefusedError, match="it may only apply the profiles of its release"):
        as_operator.request("POST", as_operator.path("FineTuneProfile") + "?dryRun=All", profile)


def test_a_profile_with_an_image_that_nobody_named_stalls_its_jobs(
    as_operator: Kube, workload: Workload, operator: OperatorFactory
) -> None:
    assert refused(as_operator, "ConfigMap", workload, {"metadata": {"name": "early"}})
    name = f"{workload.namespace}-miner"
    with workload.profile(name, trainerImage="registry.evil/miner:1"):
        workload.apply(profile=name)
        operator()
        stalled = workload.wait_for("Stalled", reason="CreateRefused")
        assert "The image registry.evil/miner:1 is not one of registry.test, finetune-trainer" in stalled["message"]
        assert workload.kube.list("Job", workload.namespace) == []
