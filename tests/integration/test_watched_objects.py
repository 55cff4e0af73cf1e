"""Objects as a real API server lets anybody write them, labels taken off, refusals, events: what the operator sees and asks."""

import time
from typing import Any

import pytest

from finetune_job.names import LABEL_MANAGED_BY, MANAGED_BY, Role
from tests.integration.conftest import OperatorFactory
from tests.integration.operator_process import OperatorProcess
from tests.integration.test_operator_process import sample
from tests.integration.workload import Workload

pytestmark = pytest.mark.integration
NO_LABEL = {"metadata": {"labels": {LABEL_MANAGED_BY: None}}}
OUR_LABEL = {LABEL_MANAGED_BY: MANAGED_BY}
QUIET_SECONDS = 20.0
"""Over which requests are counted."""


def requests(process: OperatorProcess, **labels: str) -> float:
    return sample(process, "finetune_api_requests_total", **labels)


def relists(process: OperatorProcess) -> float:
    return requests(process, verb="LIST", resource="services", code="200")


def requests_in_a_quiet_time(process: OperatorProcess) -> float:
    before, begun = requests(process), time.monotonic()
    while time.monotonic() - begun < QUIET_SECONDS:
        time.sleep(0.5)
        assert process.process.poll() is None
    return requests(process) - before


def test_idle_operator_survives_relists_of_nothing(workload: Workload, operator: OperatorFactory) -> None:
    process = operator()
    process.wait_for_line("ready")
    first = relists(process)
    workload.wait(lambda: relists(process) > first, "a relist")
    assert not process.lines("relist failed unexpectedly")
    assert requests_in_a_quiet_time(process) <= QUIET_SECONDS
    assert process.terminate() == 0


def test_training_job_without_its_label_is_restarted_as_any_other(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply()
    process = operator()
    workload.succeed(Role.PREFLIGHT)
    (pod,) = workload.wait_for_pods(Role.TRAIN)
    workload.set_running(pod)
    (first,) = workload.batch_jobs(Role.TRAIN)
    workload.kube.patch("Job", workload.namespace, first["metadata"]["name"], NO_LABEL)
    for item in workload.kube.list("Service", workload.namespace, f"{LABEL_MANAGED_BY}={MANAGED_BY}"):
        workload.kube.patch("Service", workload.namespace, item["metadata"]["name"], NO_LABEL)
    process.kill()
    process.start()
    process.wait_for_line("ready")
    workload.set_ended(pod, None, 137)
    (second,) = workload.wait_for_pods(Role.TRAIN, attempt=1)
    workload.set_running(second)
    assert [job["metadata"]["name"] for job in workload.batch_jobs(Role.TRAIN)] == ["tune-train-1"]


def test_objects_of_strangers_with_our_label_cost_nothing(workload: Workload, operator: OperatorFactory) -> None:
    kube, namespace = workload.kube, workload.namespace
    meta: dict[str, Any] = {
        "labels": OUR_LABEL | {"finetune.dev/job": "tune", "finetune.dev/role": "train", "finetune.dev/attempt": "0"}
    }
    index = "batch.kubernetes.io/job-completion-index"
    containers = [{"name": "a", "image": "a"}]
    job = workload.apply(run={"suspend": True})
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "tune-train-0", "uid": job["metadata"]["uid"], "controller": True}
    for number, value in enumerate(("²", "9" * 5000, "-1")):
        hostile = meta | {"name": f"pod-{number}", "annotations": {index: value}, "ownerReferences": [owner]}
        kube.create("Pod", namespace, {"metadata": hostile, "spec": {"containers": containers}})
    kube.create("ConfigMap", namespace, {"metadata": meta | {"name": "big"}, "data": {"plan.json": "x" * 900_000}})
    process = operator()
    process.wait_for_line("ready")
    first = relists(process)
    kube.create("ConfigMap", namespace, {"metadata": meta | {"name": "big-too"}, "data": {"plan.json": "x" * 900_000}})
    workload.wait(lambda: relists(process) > first, "a relist")
    assert sample(process, "finetune_cached_objects", kind="ConfigMap") == 0
    assert sample(process, "finetune_leading") == 1
    assert process.terminate() == 0


def test_hostile_annotation_of_our_own_pod_is_left_out_and_counted(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply()
    process = operator()
    (pod,) = workload.wait_for_pods(Role.PREFLIGHT)
    index = {"metadata": {"annotations": {"batch.kubernetes.io/job-completion-index": "²"}}}
    workload.kube.patch("Pod", workload.namespace, pod["metadata"]["name"], index)
    workload.wait(lambda: sample(process, "finetune_unreadable_objects_total", kind="Pod") >= 1, "the pod to be counted")
    process.kill()
    process.start()
    process.wait_for_line("ready")
    workload.succeed(Role.PREFLIGHT)
    workload.wait_for("Prepared")


def test_quota_on_jobs_is_told_and_waited_for(workload: Workload, operator: OperatorFactory) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"count/jobs.batch": "0"}}}
    workload.kube.create("ResourceQuota", workload.namespace, quota)
    workload.wait(
        lambda: (workload.kube.get("ResourceQuota", workload.namespace, "none") or {}).get("status", {}).get("hard"), "the quota"
    )
    workload.apply()
    process = operator()
    workload.wait(lambda: "exceeded quota" in str(workload.status()), "the server's words")
    posts = requests(process, verb="POST", resource="jobs")
    assert requests_in_a_quiet_time(process) <= QUIET_SECONDS
    assert requests(process, verb="POST", resource="jobs") - posts <= 4
    workload.kube.delete("ResourceQuota", workload.namespace, "none")
    workload.wait_for_pods(Role.PREFLIGHT)
