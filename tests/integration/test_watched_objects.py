"""What the operator asks of a real API server: relists, objects of strangers, and annotations that cannot be read."""

import time
from typing import Any

import pytest

from finetune_job.names import LABEL_MANAGED_BY, MANAGED_BY, Role
from tests.integration.conftest import OperatorFactory
from tests.integration.operator_process import OperatorProcess
from tests.integration.test_operator_process import sample
from tests.integration.workload import Workload

pytestmark = pytest.mark.integration
OUR_LABEL = {LABEL_MANAGED_BY: MANAGED_BY}
QUIET_SECONDS = 20.0
"""Over which requests are counted."""


def requests(process: OperatorProcess, **labels: str) -> float:
    return sample(process, "finetune_api_requests_total", **labels)


def relists(process: OperatorProcess) -> float:
    return requests(process, verb="LIST", resource="services", code="200")


def test_idle_operator_survives_relists_of_nothing(workload: Workload, operator: OperatorFactory) -> None:
    process = operator()
    process.wait_for_line("ready")
    first = relists(process)
    workload.wait(lambda: relists(process) > first, "a relist")
    assert not process.lines("relist failed unexpectedly")
    before = requests(process)
    time.sleep(QUIET_SECONDS)
    assert requests(process) - before <= QUIET_SECONDS
    assert process.terminate() == 0


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
