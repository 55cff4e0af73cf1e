"""The operator as a program: it survives being killed, waits for what it needs, leads alone, tells what it does, ends in
order."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from finetune_job.names import Role
from finetune_job.progress import Progress
from tests.integration.conftest import CHART, RELEASE, SYSTEM, Installed, OperatorFactory
from tests.integration.operator_process import OperatorProcess
from tests.integration.rank_zero import rank_zero
from tests.integration.workload import Workload
from tools.cluster.errors import wait_until

pytestmark = pytest.mark.integration
RANK_ZERO = "127.94.0.1"
"""A loopback address of the test's own stands for rank 0's pod."""


def sample(process: OperatorProcess, name: str, **labels: str) -> float:
    """Sum of the samples of a metric whose labels include these."""
    status, text = process.fetch("/metrics")
    assert status == 200
    # All of it takes a hundred times longer to read, and is read while something is waited for.
    lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(name))
    samples = [item for family in text_string_to_metric_families(lines) for item in family.samples if item.name == name]
    return sum(item.value for item in samples if labels.items() <= item.labels.items())


def test_sigkill_at_every_stage_neither_doubles_nor_loses_anything(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply(output={"destination": "s3://results/tuned", "secretRef": {"name": "bucket-keys"}})
    process = operator()
    seen: dict[str, str] = {}

    def restart() -> None:
        process.kill()
        process.start()
        for role in Role:
            for job in workload.batch_jobs(role):
                assert seen.setdefault(job["metadata"]["name"], job["metadata"]["uid"]) == job["metadata"]["uid"]

    process.wait_for_line("leading")
    restart()
    stages = ((Role.PREFLIGHT, "Prepared"), (Role.TRAIN, "Trained"), (Role.MERGE, "Merged"), (Role.PUBLISH, "Succeeded"))
    for role, done in stages:
        workload.wait_for_pods(role)
        restart()
        workload.succeed(role)
        restart()
        workload.wait_for(done)
        restart()
    assert sorted(seen) == ["tune-merge-0", "tune-preflight-0", "tune-publish-0", "tune-train-0"]
    assert workload.status()["restarts"]["counted"] == 0
    process.wait_for_line("ready")
    assert process.terminate() == 0


def test_progress_of_rank_zero_reaches_the_status(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply()
    operator()
    workload.succeed(Role.PREFLIGHT)
    (pod,) = workload.wait_for_pods(Role.TRAIN)
    with rank_zero(RANK_ZERO, Progress(attempt=0, step=3, total_steps=4, loss=1.25, checkpoint_step=2)):
        workload.set_running(pod, RANK_ZERO)
        workload.wait(lambda: (workload.status().get("progress") or {}).get("step") == 3, "the progress")
    progress = workload.status()["progress"]
    assert (progress["totalSteps"], progress["checkpointStep"], progress["summary"]) == (4, 2, "3/4")


def test_job_that_waits_costs_no_writes_and_no_passes(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply("waits", output={"destination": "pvc://absent/tuned"})
    process = operator()
    workload.wait_for("Stalled", "True", "ClaimNotFound", name="waits")
    # A second job taken from start to pods is the clock: by then a busy loop over the first would have gone round often.
    workload.apply("works")
    workload.wait_for_pods(Role.PREFLIGHT, name="works")
    workload.wait(lambda: sample(process, "finetune_queue_keys", state="ready") == 0, "an empty queue")
    version = workload.job("waits")["metadata"]["resourceVersion"]
    workload.apply("works-too")
    workload.wait_for_pods(Role.PREFLIGHT, name="works-too")
    assert workload.job("waits")["metadata"]["resourceVersion"] == version
    assert sample(process, "finetune_reconcile_seconds_count") < 60
    assert len([line for line in process.lines("decided") if line["job"] == "waits"]) <= 3


def test_an_object_of_any_depth_stops_nobody_else(installed: Installed, workload: Workload, operator: OperatorFactory) -> None:
    """The free-form settings of a method have no bound in the schema, and 9,000 levels are more than Python reads by itself."""
    shape = workload.apply("shape", method={"type": "LoHa", "settings": {"targetModules": "DEEP"}}, merge={"enabled": False})
    workload.kube.delete("FineTuneJob", workload.namespace, "shape")
    body = json.dumps({**shape, "metadata": {"name": "deep"}}).replace('"DEEP"', "[" * 9000 + "]" * 9000)
    installed.cluster.kubectl("create", "--namespace", workload.namespace, "--filename", "-", input=body)
    process = operator()
    process.wait_for_line("ready")
    try:
        workload.apply("plain")
        wait_until(lambda: phase_of(installed, workload, "plain") == "Preflight", "the other job to go on", 120)
        wait_until(lambda: phase_of(installed, workload, "deep") == "Stalled", "the deep object to be refused", 120)
        assert sample(process, "finetune_reconcile_seconds_count", result="defect") == 0
    finally:
        workload.kube.delete("FineTuneJob", workload.namespace, "deep")


def phase_of(installed: Installed, workload: Workload, name: str) -> str:
    """By kubectl, which reads objects of any depth."""
    return installed.cluster.kubectl(
        *("get", "finetunejob", name, "--namespace", workload.namespace, "--output", "jsonpath={.status.phase}")
    ).strip()


def test_metrics_and_probes(workload: Workload, operator: OperatorFactory) -> None:
    workload.apply()
    process = operator()
    process.wait_for_line("ready")
    assert process.fetch("/readyz")[0] == 200
    assert process.fetch("/healthz")[0] == 200
    assert process.fetch("/elsewhere")[0] == 404
    workload.wait_for_pods(Role.PREFLIGHT)
    workload.wait(lambda: sample(process, "finetune_jobs", namespace=workload.namespace, phase="Preflight") == 1, "jobs by phase")
    workload.wait(lambda: sample(process, "finetune_cached_objects", kind="Pod") == 1, "the pod in the cache")
    assert sample(process, "finetune_api_requests_total", verb="PATCH", code="200") >= 1
    assert sample(process, "finetune_api_requests_total", verb="POST", code="201") >= 2
    workload.wait(lambda: sample(process, "finetune_reconcile_seconds_count", result="acted") >= 1, "a pass that acted")
    assert sample(process, "finetune_reconcile_seconds_count", result="defect") == 0
    assert sample(process, "finetune_job_conditions", condition="Validated", status="True") == 1
    assert sample(process, "finetune_leading") == 1
    workload.kube.delete("FineTuneJob", workload.namespace, "tune")
    workload.wait(lambda: sample(process, "finetune_jobs") == 0, "the series to go with its job")


def test_one_of_two_replicas_leads_and_the_other_takes_over(workload: Workload, operator: OperatorFactory) -> None:
    first = operator("first")
    first.wait_for_line("ready")
    second = operator("second")
    wait_until(lambda: second.fetch("/readyz")[0] == 200, "the standby to be ready", 60)
    workload.apply()
    workload.wait_for_pods(Role.PREFLIGHT)
    assert not second.lines("leading")
    lease = workload.kube.get("Lease", SYSTEM, RELEASE)
    assert lease is not None
    assert lease["spec"]["holderIdentity"] == "first"
    assert first.terminate() == 0
    second.wait_for_line("leading")
    workload.succeed(Role.PREFLIGHT)
    workload.wait_for_pods(Role.TRAIN)
    assert not second.lines("pass failed unexpectedly")


def test_operator_started_before_its_definitions_exist(
    installed: Installed, workload: Workload, operator: OperatorFactory
) -> None:
    kube = installed.kube
    profile = kube.get("FineTuneProfile", "", "default")
    assert profile is not None
    names = ("finetunejobs.finetune.dev", "finetuneprofiles.finetune.dev")
    for name in names:
        kube.delete("CustomResourceDefinition", "", name)
    wait_until(lambda: not any(kube.get("CustomResourceDefinition", "", name) for name in names), "the CRDs to go", 120)
    process = operator()
    process.wait_for_line("waiting for the API server to serve our kinds")
    assert process.fetch("/readyz")[0] == 503
    assert process.fetch("/healthz")[0] == 200
    # As Helm does, which owns them afterwards.
    installed.cluster.kubectl("apply", "--server-side", "--field-manager=helm", "-f", CHART / "files" / "crds")
    body = {
        "apiVersion": profile["apiVersion"],
        "kind": profile["kind"],
        "metadata": {"name": "default"},
        "spec": profile["spec"],
    }
    installed.cluster.kubectl("wait", "--for=condition=Established", "--timeout=120s", *(f"crd/{name}" for name in names))
    installed.cluster.kubectl("apply", "-f", "-", input=json.dumps(body))
    process.wait_for_line("ready")
    workload.apply()
    workload.wait_for_pods(Role.PREFLIGHT)
