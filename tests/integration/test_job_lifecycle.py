"""A FineTuneJob on a real API server, its Jobs run by the real Job controller, its pods by the test."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from finetune_job.failures import FailureClass
from finetune_job.names import CREDENTIALS_MOUNT, LABEL_JOB, Role
from tests.integration.conftest import RELEASE, SYSTEM, OperatorFactory
from tests.integration.kube import Document, RefusedError
from tests.integration.workload import Workload

pytestmark = pytest.mark.integration


def test_job_goes_from_apply_to_succeeded(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply()
    process = operator(everywhere=True)
    workload.wait_for("Validated")
    plan = workload.wait(lambda: workload.kube.get("ConfigMap", workload.namespace, "tune-plan"), "the plan")
    assert plan["data"]["plan.json"].startswith("{")
    policy = workload.kube.get("NetworkPolicy", workload.namespace, "tune-run")
    assert policy is not None
    assert policy["metadata"]["creationTimestamp"] <= plan["metadata"]["creationTimestamp"]
    (readers,) = [rule["from"] for rule in policy["spec"]["ingress"] if "ports" in rule]
    assert readers == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "finetune-system"}}}]
    assert workload.status()["startTime"]
    assert len(workload.status()["plan"]["hash"]) == 64
    workload.succeed(Role.PREFLIGHT, model_digest="m" * 8, data_hash="d" * 8)
    workload.wait_for("Prepared")
    assert workload.status()["plan"]["dataHash"] == "d" * 8
    workload.wait(lambda: workload.kube.get("Service", workload.namespace, "tune-gang"), "the gang's Service")
    workload.succeed(Role.TRAIN)
    workload.wait_for("Trained")
    workload.succeed(Role.MERGE)
    workload.wait_for("Succeeded")
    assert workload.condition("Finished")["status"] == "True"
    assert workload.status()["phase"] == "Succeeded"
    assert [(attempt["role"], attempt["number"], attempt["outcome"]) for attempt in workload.status()["attempts"]] == [
        ("preflight", 0, "Succeeded"),
        ("train", 0, "Succeeded"),
        ("merge", 0, "Succeeded"),
    ]
    assert "finalizers" not in workload.job()["metadata"]
    workload.wait(
        lambda: any(event["involvedObject"]["name"] == "tune" for event in workload.kube.list("Event", workload.namespace)),
        "an event on the job",
    )
    decided = [line for line in process.lines("decided") if line["namespace"] == workload.namespace]
    assert {line["job"] for line in decided} == {"tune"}
    assert [name for line in decided for name in line["creates"]] == [
        "NetworkPolicy/tune-run",
        "ConfigMap/tune-plan",
        "Job/tune-preflight-0",
        "Service/tune-gang",
        "Job/tune-train-0",
        "Job/tune-merge-0",
    ]


def finding_events(workload: Workload) -> list[Document]:
    found = [event for event in workload.kube.list("Event", workload.namespace) if event["reason"] == "Finding"]
    return sorted(found, key=lambda event: event["message"])


def test_refused_job_shows_its_finding_and_takes_no_pod(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply(output={"destination": "pvc://models/base"}, parallelism={"fsdp": {"useOrigParams": True}})
    process = operator()
    refusal = workload.wait_for("Validated", "False", "Refused")
    assert refusal["message"].startswith("output-inside-input: spec.output.destination: ")
    findings = {finding["rule"]: finding for finding in workload.status()["findings"]}
    finding = findings["output-inside-input"]
    assert (finding["severity"], finding["value"]) == ("error", "pvc://models/base")
    assert finding["fix"]
    assert finding["source"]
    workload.wait(lambda: len(finding_events(workload)) == 2, "an event for each finding")
    assert [(event["type"], event["message"].partition(":")[0]) for event in finding_events(workload)] == [
        ("Normal", "no-effect-use-orig-params"),
        ("Warning", "output-inside-input"),
    ]
    for rule, severity in (("output-inside-input", "error"), ("no-effect-use-orig-params", "warning")):
        counted = f'finetune_validation_findings_total{{rule="{rule}",severity="{severity}"}} 1.0'
        workload.wait(lambda counted=counted: counted in process.fetch("/metrics")[1], counted)
    workload.wait_for("Stalled")
    assert workload.batch_jobs(Role.PREFLIGHT) == []
    assert "startTime" not in workload.status()
    # The fixed spec continues by itself: nothing is frozen before the start.
    workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"output": {"destination": "pvc://results/tuned"}}})
    workload.wait_for("Validated")
    workload.wait_for_pods(Role.PREFLIGHT)


def test_sources_elsewhere_are_fetched_first_by_the_one_pod_with_credentials(
    workload: Workload, operator: OperatorFactory
) -> None:
    workload.apply(
        model={"source": "hf://org/base", "revision": "0" * 40}, fetch={"hubTokenSecretRef": {"name": "hub-token", "key": "read"}}
    )
    operator()
    (pod,) = workload.wait_for_pods(Role.FETCH)
    assert credential_files(pod) == {"hub-token": {"read": "hub/token"}}
    assert [mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"] if "/claims/" in mount["mountPath"]] == [
        "/claims/workspace"
    ]
    workload.fail(pod, FailureClass.USER_MODEL, "the hub answered 401")
    refused = workload.wait_for("Fetched", "False", "FetchRefused")
    assert "the hub answered 401" in refused["message"]
    workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"run": {"retry": 1}}})
    workload.succeed(Role.FETCH, 1)
    workload.wait_for("Fetched")
    (pod,) = workload.wait_for_pods(Role.PREFLIGHT)
    assert "secret" not in str(pod["spec"])


def credential_files(pod: Document) -> dict[str, dict[str, str]]:
    """File below the mount point by key, for each Secret that the pod's container sees."""
    (container,) = pod["spec"]["containers"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == CREDENTIALS_MOUNT]
    assert mount["readOnly"] is True
    (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"]]
    sources = [source["secret"] for source in volume["projected"]["sources"]]
    return {secret["name"]: {item["key"]: item["path"] for item in secret["items"]} for secret in sources}


def test_results_for_elsewhere_are_published_last_by_the_one_pod_with_credentials(
    workload: Workload, operator: OperatorFactory
) -> None:
    workload.apply(output={"destination": "oci://registry.test/team/tuned:v1", "secretRef": {"name": "registry-login"}})
    operator()
    for role in (Role.PREFLIGHT, Role.TRAIN, Role.MERGE):
        (pod,) = workload.wait_for_pods(role)
        assert "registry-login" not in str(pod)
        workload.succeed(role)
    workload.wait_for("Merged")
    (pod,) = workload.wait_for_pods(Role.PUBLISH)
    workload.wait(lambda: workload.status()["phase"] == "Publishing", "the phase Publishing")
    assert credential_files(pod) == {"registry-login": {".dockerconfigjson": "registry/config.json"}}
    mounts = [mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"] if "/claims/" in mount["mountPath"]]
    assert mounts == ["/claims/workspace"]
    workload.fail(pod, FailureClass.DESTINATION_REFUSED, "the registry answered 401")
    refused = workload.wait_for("Published", "False", "PublishRefused")
    assert "the registry answered 401" in refused["message"]
    workload.wait_for("Stalled", "True", "PublishRefused")
    assert workload.condition("Finished")["status"] != "True"
    workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"run": {"retry": 1}}})
    digest = "d" * 64
    address = f"oci://registry.test/team/tuned:v1@sha256:{digest}"
    workload.succeed(Role.PUBLISH, 1, address=address, digest=f"sha256:{digest}")
    workload.wait_for("Succeeded")
    assert workload.condition("Published")["status"] == "True"
    assert workload.status()["artifacts"] == [{"name": "published", "path": address, "sha256": digest}]
    assert workload.status()["publishAttempt"] == 1


def test_results_reach_no_place_outside_that_the_profile_does_not_name(workload: Workload, operator: OperatorFactory) -> None:
    allowed = {"allowedDestinations": ["oci://registry.test/team", "s3://ours"]}
    some, none, writer = f"{workload.namespace}-open", f"{workload.namespace}-closed", {"secretRef": {"name": "registry-login"}}
    refused = {
        "other-host": (some, "oci://registry.evil/team/tuned:v1"),
        "longer-host": (some, "oci://registry.test.evil/team/tuned:v1"),
        "longer-team": (some, "oci://registry.test/team-evil/tuned:v1"),
        "other-bucket": (some, "s3://theirs/tuned"),
        "hub": (some, "hf://our-org/tuned"),
        "unset": (none, "oci://registry.test/team/tuned:v1"),
    }
    with workload.profile(some, publish=allowed), workload.profile(none):
        for name, (profile, destination) in refused.items():
            workload.apply(name, profile=profile, output={"destination": destination, **writer})
        operator()
        for name, (profile, destination) in refused.items():
            message = workload.wait_for("Validated", "False", "Refused", name=name)["message"]
            assert message.startswith("destination-not-allowed: spec.output.destination: "), name
            (finding,) = [one for one in workload.status(name)["findings"] if one["severity"] == "error"]
            assert (finding["rule"], finding["value"]) == ("destination-not-allowed", destination)
            assert ("oci://registry.test/team, s3://ours" if profile == some else "no destination outside") in finding["message"]
            workload.wait_for("Stalled", "True", "Refused", name=name)
            assert "startTime" not in workload.status(name)
        # The operator does launch what the same profile allows, and that alone.
        workload.apply(profile=some, output={"destination": "oci://registry.test/team/tuned:v1", **writer})
        workload.wait_for_pods(Role.PREFLIGHT)
        for kind in ("Job", "Pod", "NetworkPolicy", "Service"):
            launched = {item["metadata"]["labels"][LABEL_JOB] for item in workload.kube.list(kind, workload.namespace)}
            assert launched <= {"tune"}, kind
        plans = [one["metadata"]["name"] for one in workload.kube.list("ConfigMap", workload.namespace)]
        assert [one for one in plans if one.endswith("-plan")] == ["tune-plan"]


def test_an_invalid_profile_says_what_its_jobs_say_until_it_is_corrected(workload: Workload, operator: OperatorFactory) -> None:
    name = f"twice-{workload.namespace}"

    def ready(status: str) -> Document:
        profile = workload.kube.get("FineTuneProfile", "", name)
        assert profile is not None
        found = profile.get("status", {}).get("conditions", [])
        return next((one for one in found if (one["type"], one["status"]) == ("Ready", status)), {})

    with workload.profile(name, pods={"train": {"extraResources": {"cpu": "1"}}}):
        workload.apply(profile=name)
        operator()
        said = workload.wait(lambda: ready("False"), "the profile to say that it is not valid")
        assert said["reason"] == "ProfileInvalid"
        assert said["message"].startswith(f"FineTuneProfile '{name}' is not valid: spec.pods.train.extraResources")
        stalled = workload.wait_for("Stalled", reason="ProfileInvalid")
        assert stalled["message"] == f"spec.profile: {said['message']}"
        workload.kube.patch("FineTuneProfile", "", name, {"spec": {"pods": {"train": {"extraResources": None}}}})
        workload.wait(lambda: ready("True"), "the profile to be ready")
        workload.wait_for_pods(Role.PREFLIGHT)


def test_failed_rank_is_recorded_before_the_one_restart(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply(parallelism={"nodes": 2})
    operator()
    workload.succeed(Role.PREFLIGHT)
    first, second = workload.wait_for_pods(Role.TRAIN, 0, number=2)
    for pod in (first, second):
        workload.set_running(pod)
    workload.wait_for("Ready", "True", "Running")
    workload.fail(second, FailureClass.INTERNAL, "no such device", rank=1)
    workload.wait(lambda: workload.status().get("attempt") == 1, "the number of the next attempt in status")
    (attempt,) = workload.attempts(Role.TRAIN)
    assert (attempt["outcome"], attempt["failure"], attempt["counted"]) == ("Failed", "Internal", True)
    assert any("no such device" in evidence.get("message", "") for evidence in attempt["evidence"])
    workload.succeed(Role.TRAIN, 1, nodes=2)
    workload.wait_for("Trained")
    workload.succeed(Role.MERGE)
    workload.wait_for("Succeeded")
    names = [job["metadata"]["name"] for job in workload.batch_jobs(Role.TRAIN)]
    assert names == ["tune-train-1"]
    assert [item["number"] for item in workload.attempts(Role.TRAIN)] == [0, 1]
    restarts = workload.status()["restarts"]
    assert (restarts["counted"], restarts["uncounted"]) == (1, 0)


def test_evidence_of_a_deleted_pod_reaches_the_status(workload: Workload, operator: OperatorFactory) -> None:
    """The Job controller deletes a failed Job's other pods at once; here the pod with the cause vanishes too."""
    workload.apply()
    operator()
    workload.succeed(Role.PREFLIGHT)
    (pod,) = workload.wait_for_pods(Role.TRAIN)
    workload.set_running(pod)
    workload.wait_for("Ready", "True", "Running")
    workload.fail(pod, FailureClass.NON_FINITE, "the loss is NaN at step 2")
    workload.kube.delete("Pod", workload.namespace, pod["metadata"]["name"])
    workload.wait_for("Finished")
    (attempt,) = workload.attempts(Role.TRAIN)
    assert attempt["failure"] == "NonFinite"
    assert attempt["evidence"][0]["pod"] == pod["metadata"]["name"]
    assert workload.condition("Succeeded")["status"] == "False"


def test_cancelled_job_ends_and_its_pods_go(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply()
    operator()
    workload.wait_for_pods(Role.PREFLIGHT)
    workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"run": {"cancel": True}}})
    workload.wait_for("Finished", "True", "Cancelled")
    workload.wait(lambda: not workload.batch_jobs(Role.PREFLIGHT), "the preflight Job to be deleted")


def test_suspended_job_gives_back_its_pods_and_goes_on(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply()
    operator()
    workload.succeed(Role.PREFLIGHT)
    workload.wait_for_pods(Role.TRAIN)
    workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"run": {"suspend": True}}})
    workload.wait_for("Suspended")
    workload.wait(lambda: not workload.batch_jobs(Role.TRAIN), "the training Job to be deleted")
    workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"run": {"suspend": False}}})
    workload.wait_for("Suspended", "False")
    workload.wait(lambda: workload.batch_jobs(Role.TRAIN), "a new attempt")
    assert workload.status()["restarts"]["counted"] == 0


def add_quota(workload: Workload, name: str, hard: dict[str, str]) -> None:
    """A quota that is in force."""
    workload.kube.create("ResourceQuota", workload.namespace, {"metadata": {"name": name}, "spec": {"hard": hard}})
    workload.wait(
        lambda: (workload.kube.get("ResourceQuota", workload.namespace, name) or {}).get("status", {}).get("hard"), "the quota"
    )


def test_a_quota_on_jobs_is_said_and_waited_for(workload: Workload, operator: OperatorFactory) -> None:
    add_quota(workload, "no-jobs", {"count/jobs.batch": "0"})
    workload.apply()
    operator()
    refused = workload.wait_for("Prepared", "Unknown", "CreateRefused")
    assert "exceeded quota: no-jobs" in refused["message"]
    assert workload.condition("Stalled")["status"] == "False", "capacity is waited for"
    workload.wait(
        lambda: [event for event in workload.kube.list("Event", workload.namespace) if event["reason"] == "CreateRefused"],
        "an event with the server's words",
    )
    workload.kube.delete("ResourceQuota", workload.namespace, "no-jobs")
    workload.wait_for_pods(Role.PREFLIGHT)


def test_a_quota_on_pods_is_said_from_the_events_of_the_job(workload: Workload, operator: OperatorFactory) -> None:
    add_quota(workload, "no-pods", {"pods": "0"})
    workload.apply()
    operator()
    refused = workload.wait_for("Prepared", "Unknown", "CreateRefused")
    assert "exceeded quota: no-pods" in refused["message"]
    workload.kube.delete("ResourceQuota", workload.namespace, "no-pods")
    workload.wait_for_pods(Role.PREFLIGHT)


def test_a_job_made_anew_under_its_old_name_waits_for_what_the_old_one_leaves(
    workload: Workload, operator: OperatorFactory
) -> None:
    first = workload.apply()
    operator()
    (pod,) = workload.wait_for_pods(Role.PREFLIGHT)
    (job,) = workload.batch_jobs(Role.PREFLIGHT)
    # As a node that is slow to end its pods does: the old Job is still there, and being deleted.
    workload.kube.patch("Job", workload.namespace, job["metadata"]["name"], {"metadata": {"finalizers": ["finetune.dev/test"]}})
    workload.kube.delete("FineTuneJob", workload.namespace, "tune")
    workload.wait(lambda: workload.kube.get("FineTuneJob", workload.namespace, "tune") is None, "the old job to be gone")
    second = workload.apply()
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    workload.wait_for("Ready", "False", "Pending")
    assert workload.condition("Stalled")["status"] == "False", "it is no conflict"
    workload.kube.patch("Job", workload.namespace, job["metadata"]["name"], {"metadata": {"finalizers": None}})
    old = pod["metadata"]["uid"]
    workload.wait(lambda: [one for one in workload.pods(Role.PREFLIGHT) if one["metadata"]["uid"] != old], "a pod of the new job")


def test_a_profile_is_for_namespaces_by_their_labels(workload: Workload, operator: OperatorFactory) -> None:
    name = f"{workload.namespace}-labelled"
    selector = {"matchLabels": {"team.example/gpus": "yes"}, "matchExpressions": [{"key": "frozen", "operator": "DoesNotExist"}]}
    with workload.profile(name, namespaceSelector=selector):
        workload.apply(profile=name)
        operator()
        stalled = workload.wait_for("Stalled", "True", "ProfileNotAllowed")
        assert "whose labels do not match its namespaceSelector" in stalled["message"]
        assert workload.batch_jobs(Role.PREFLIGHT) == []
        labels = {"metadata": {"labels": {"team.example/gpus": "yes"}}}
        workload.kube.patch("Namespace", "", workload.namespace, labels)
        time.sleep(2.1)  # how long the operator believes labels
        # It would look again after half a minute by itself.
        workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"spec": {"run": {"retry": 1}}})
        workload.wait_for_pods(Role.PREFLIGHT)
        # What has started is not judged again, and what comes later is.
        workload.kube.patch("Namespace", "", workload.namespace, {"metadata": {"labels": {"frozen": ""}}})
        time.sleep(2.1)
        workload.apply("late", profile=name, output={"destination": "pvc://results/late"})
        workload.wait_for("Stalled", "True", "ProfileNotAllowed", name="late")
        workload.succeed(Role.PREFLIGHT)
        workload.wait_for_pods(Role.TRAIN)


@pytest.mark.parametrize("policy", ["Orphan", pytest.param("Background", marks=pytest.mark.nightly), "Foreground"])
def test_a_gangs_job_that_somebody_deletes_is_made_again_and_no_pod_of_the_old_one_stays(
    workload: Workload, operator: OperatorFactory, policy: str
) -> None:
    workload.apply()
    operator()
    workload.succeed(Role.PREFLIGHT)
    (pod,) = workload.wait_for_pods(Role.TRAIN)
    workload.set_running(pod)
    workload.wait_for("Ready", "True", "Running")
    workload.kube.delete("Job", workload.namespace, "tune-train-0", policy)
    (fresh,) = workload.wait_for_pods(Role.TRAIN, 1)
    assert fresh["metadata"]["uid"] != pod["metadata"]["uid"]
    assert workload.kube.get("Pod", workload.namespace, pod["metadata"]["name"]) is None, "two gangs"
    (attempt, _) = (*workload.attempts(Role.TRAIN), None)
    assert (attempt["outcome"], attempt["failure"], attempt["counted"]) == ("Failed", "Infrastructure", False)


def test_a_gangs_job_that_loses_its_label_is_made_again_and_no_pod_of_the_old_one_stays(
    workload: Workload, operator: OperatorFactory
) -> None:
    workload.apply()
    process = operator()
    workload.wait_for_pods(Role.PREFLIGHT)
    label = {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}}
    workload.kube.patch("ConfigMap", workload.namespace, "tune-plan", label)
    workload.succeed(Role.PREFLIGHT)
    workload.wait_for("Prepared")
    (pod,) = workload.wait_for_pods(Role.TRAIN)
    workload.set_running(pod)
    workload.wait_for("Ready", "True", "Running")
    workload.kube.patch("Job", workload.namespace, "tune-train-0", label)
    (fresh,) = workload.wait_for_pods(Role.TRAIN, 1)
    assert fresh["metadata"]["uid"] != pod["metadata"]["uid"]
    assert workload.kube.get("Pod", workload.namespace, pod["metadata"]["name"]) is None, "two gangs"
    assert workload.kube.get("Job", workload.namespace, "tune-train-0") is None
    (attempt, _) = (*workload.attempts(Role.TRAIN), None)
    assert (attempt["outcome"], attempt["failure"], attempt["counted"]) == ("Failed", "Infrastructure", False)
    workload.succeed(Role.TRAIN, 1)
    workload.succeed(Role.MERGE)
    workload.wait_for("Succeeded")
    assert len(process.lines("decided")) < 60, "no pass repeats itself"


RBAC = {"apiVersion": "rbac.authorization.k8s.io/v1"}
NODE, XID = "node-with-a-broken-gpu", {"type": "GpuXidError", "status": "True", "reason": "Xid79", "message": "off the bus"}


@pytest.fixture
def bad_node(workload: Workload) -> Iterator[str]:
    """A profile that names a condition, and a node that gets it; nothing is scheduled there. Returns the profile's name."""
    kube, name = workload.kube, workload.namespace
    gpu = {"memory": "80Gi", "faultConditions": [{"type": "GpuXidError"}]}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "spec": {"unschedulable": True}}
    with workload.profile(name, **workload.default_profile() | {"gpu": gpu}):
        kube.create("Node", "", node)
        yield name
        kube.delete("Node", "", NODE)
    for pod in kube.list("Pod", workload.namespace):
        try:
            kube.request("DELETE", f"/api/v1/namespaces/{workload.namespace}/pods/{pod['metadata']['name']}?gracePeriodSeconds=0")
        except RefusedError as error:
            # Its Job may have removed it meanwhile.
            if error.code != 404:
                raise


def test_a_condition_of_the_node_explains_a_failure_to_an_operator_that_may_read_it(
    workload: Workload, operator: OperatorFactory, bad_node: str
) -> None:
    kube, namespace = workload.kube, workload.namespace
    process = operator()

    def fails(name: str) -> Document:
        workload.apply(name, profile=bad_node)
        workload.succeed(Role.PREFLIGHT, name=name)
        (pod,) = workload.wait_for_pods(Role.TRAIN, name=name)
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["metadata"]["name"]}, "target": target}
        kube.request("POST", f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}/binding", binding)
        workload.set_running(pod)
        workload.wait_for("Trained", "Unknown", "Running", name=name)
        moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = [XID | {"lastTransitionTime": moment, "lastHeartbeatTime": moment}]
        kube.patch("Node", "", NODE, {"status": {"conditions": conditions}}, "status")
        workload.fail(pod, FailureClass.INTERNAL, "an operation failed")
        found: list[Document] = workload.wait(
            lambda: [one for one in workload.attempts(Role.TRAIN, name) if one.get("failure")], ""
        )
        return found[0]

    unread = fails("unread")
    assert (unread["failure"], unread["counted"]) == ("Internal", True)
    assert "rbac.readNodes=true" in process.wait_for_line("the conditions of a node cannot be read")["fix"]
    rules = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    kube.create("ClusterRole", "", RBAC | {"kind": "ClusterRole", "metadata": {"name": namespace}, "rules": rules})
    subjects = [{"kind": "ServiceAccount", "name": RELEASE, "namespace": SYSTEM}]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": namespace}
    binding = {"kind": "ClusterRoleBinding", "metadata": {"name": namespace}, "roleRef": role, "subjects": subjects}
    kube.create("ClusterRoleBinding", "", RBAC | binding)
    read = fails("read")
    assert (read["failure"], read.get("counted", False)) == ("DeviceFault", False)
    assert read["message"].startswith(
        f"node {NODE} has the condition GpuXidError=True: Xid79 off the bus. The ranks saw: Internal"
    )
    for kind in ("ClusterRoleBinding", "ClusterRole"):
        kube.delete(kind, "", namespace)
