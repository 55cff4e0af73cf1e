"""Every query of the dashboards and every recording rule has data in a real Prometheus, which scraped a real operator and what
rank 0 of a real training answered while it trained. Metrics of GPUs and of the kubelet, of which there are none here, come from
lines that are served as exporters serve them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from finetune_cli.local.launch import free_port
from finetune_job.failures import FailureClass
from finetune_job.http_server import Answer, HttpServer
from finetune_job.names import Role
from finetune_job.progress import Progress
from tests.integration.conftest import OperatorFactory
from tests.integration.rank_zero import rank_zero
from tests.integration.workload import Workload
from tests.support.prometheus import Document, Prometheus, rendered, rendered_rules, running_prometheus
from tools import dashboards
from tools.cluster.errors import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
ADDRESS = "127.0.0.77"
"""Of rank 0, for the operator."""
DEADLINE = 120.0
ANSWERS, SECONDS_BETWEEN_ANSWERS = 8, 0.25
GPU_LABELS = 'gpu="0",UUID="GPU-5f1c",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="node-a",container="trainer"'
EXPORTED = (
    # Of rank 0, which knows the peaks of GPUs alone.
    'finetune_training_mfu_ratio{namespace="%(namespace)s",pod="%(pod)s",name="tune"} 0.41',
    'DCGM_FI_PROF_GR_ENGINE_ACTIVE{%(gpu)s,namespace="%(namespace)s",pod="%(pod)s"} 0.934211',
    'DCGM_FI_DEV_FB_USED{%(gpu)s,namespace="%(namespace)s",pod="%(pod)s"} 61231',
    'DCGM_FI_DEV_XID_ERRORS{%(gpu)s,namespace="%(namespace)s",pod="%(pod)s"} 0',
    'kubelet_volume_stats_available_bytes{namespace="%(namespace)s",persistentvolumeclaim="workspace"} 8.5e+10',
    'kubelet_volume_stats_capacity_bytes{namespace="%(namespace)s",persistentvolumeclaim="workspace"} 1.07e+11',
)


def recorded_training(claims: Path) -> list[Answer]:
    """What rank 0 says of its metrics, one answer after the other, while a tiny model is trained."""
    # Brings torch, which every process that collects tests would load.
    from tests.support.tiny_model import run_context, tiny_spec

    spec = tiny_spec(
        training={"maxSteps": 100_000, "globalBatchSize": 4}, parallelism={"processesPerNode": 2}, checkpoint={"everySteps": 20}
    )
    context = run_context(claims, spec)
    arguments = {
        "--plan": context.workspace.root / "plan.json",
        "--plan-sha256": context.plan_sha256,
        "--claims-root": claims,
        "--termination-log": claims / "termination.json",
        "--master-port": free_port(),
        "--master-address": "localhost",
        "--node-rank": 0,
        "--observe-port": 0,
    }
    command = [
        "nice",
        sys.executable,
        "-m",
        "finetune_trainer",
        "train",
        *(str(part) for pair in arguments.items() for part in pair),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def port_after_first_checkpoint() -> int:
        assert process.poll() is None, (claims / "termination.json").read_text()
        try:
            port = int(json.loads((context.workspace.root / "observe.json").read_text())["port"])
            with opener.open(f"http://127.0.0.1:{port}/progress", timeout=5) as answer:
                return port if json.load(answer)["checkpoint_step"] else 0
        except (OSError, ValueError):
            return 0

    def metrics(port: int) -> Answer:
        with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return Answer(answer.read(), answer.headers["Content-Type"])

    try:
        port = wait_until(port_after_first_checkpoint, "the first checkpoint of the training", DEADLINE)
        answers = [metrics(port)]
        for _ in range(ANSWERS - 1):
            time.sleep(SECONDS_BETWEEN_ANSWERS)
            answers.append(metrics(port))
        return answers
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


@contextmanager
def replayed(answers: list[Answer]) -> Iterator[int]:
    """The port of a server that gives these answers, and the last one from then on. A training would take both processors."""
    left = iter(answers)
    server = HttpServer("127.0.0.1", 0, {"/metrics": lambda: next(left, answers[-1])}, name="rank-0")
    server.start()
    try:
        yield int(server.address[1])
    finally:
        server.stop()


def target(name: str, port: int, labels: dict[str, str], monitor: Document, *, honors: bool = False) -> Document:
    """A scrape config of Prometheus with what the monitor of the chart asks for."""
    relabelings = [
        {
            "source_labels": one["sourceLabels"],
            "regex": one["regex"],
            "target_label": one["targetLabel"],
            "replacement": one["replacement"],
        }
        for one in monitor.get("metricRelabelings", ())
    ]
    return {
        "job_name": name,
        "honor_labels": monitor.get("honorLabels", honors),
        "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": labels}],
        "metric_relabel_configs": relabelings,
    }


def operators_monitor() -> Document:
    (monitor,) = [one for one in rendered("metrics.serviceMonitor.create=true") if one["kind"] == "ServiceMonitor"]
    endpoint: Document = monitor["spec"]["endpoints"][0]
    return endpoint


def apply_jobs(workload: Workload, profile: str) -> None:
    """Three that train, and one that waits."""
    for name in ("done", "broken", "tune", "late"):
        workload.apply(name, profile=profile, run={"maxRestarts": 1}, output={"destination": f"pvc://results/{name}"})
    for name in ("done", "broken", "tune"):
        workload.succeed(Role.PREFLIGHT, name=name, model_digest="m" * 8, data_hash="d" * 8, memory_estimate="2000000000")
        (pod,) = workload.wait_for_pods(Role.TRAIN, name=name)
        workload.set_running(pod, ADDRESS)


def test_every_query_has_data(workload: Workload, operator: OperatorFactory, tmp_path: Path) -> None:
    profile, namespace, pod_of_rank_0 = f"gpus-{workload.namespace}", workload.namespace, f"tune-train-0-0-{'x' * 5}"
    lines = "\n".join(EXPORTED) % {"gpu": GPU_LABELS, "namespace": namespace, "pod": pod_of_rank_0} + "\n"
    exporter = HttpServer("127.0.0.1", 0, {"/metrics": lambda: Answer(lines.encode(), "text/plain")}, name="exporter")
    told = Progress(attempt=0, step=3, total_steps=4, loss=1.5, eval_loss=1.6, tokens_per_second=10.0, goodput=0.9)
    with (
        workload.profile(profile, gpu={"pricePerHour": "2.50"}, pods={"train": {"queueName": "gpus"}}),
        rank_zero(ADDRESS, told),
        replayed(recorded_training(tmp_path / "claims")) as rank_0,
        ExitStack() as stack,
    ):
        exporter.start()
        stack.callback(exporter.stop)
        process = operator()
        port = int(process.wait_for_line("listening")["port"])
        process.wait_for_line("ready")
        targets = [
            target("operator", port, {"namespace": "finetune-system", "pod": "operator-7d4"}, operators_monitor()),
            target("rank-0", rank_0, {"namespace": namespace, "pod": pod_of_rank_0, "name": "tune"}, {}),
            target("exporters", exporter.address[1], {}, {}, honors=True),
        ]
        prometheus = stack.enter_context(running_prometheus(tmp_path / "prometheus", free_port(), targets, rendered_rules()))
        apply_jobs(workload, profile)
        _ends(workload, prometheus)
        _has_data(prometheus, namespace)


def _ends(workload: Workload, prometheus: Prometheus) -> None:
    """Two jobs are restarted, one of them succeeds, a third fails, once Prometheus has seen that there was nothing before."""
    ours = f'namespace="{workload.namespace}"'
    workload.wait(lambda: prometheus.query(f'finetune_jobs_total{{reason="Completed",{ours}}}'), "counters with zero")
    workload.wait(lambda: workload.status("tune").get("progress"), "what rank 0 says of its progress")
    for name in ("done", "tune"):
        (pod,) = workload.wait_for_pods(Role.TRAIN, name=name)
        workload.fail(pod, FailureClass.COLLECTIVE, "a rank is gone")
    (pod,) = workload.wait_for_pods(Role.TRAIN, name="broken")
    workload.fail(pod, FailureClass.USER_DATA, "no records")
    (pod,) = workload.wait_for_pods(Role.TRAIN, 1, name="tune")
    workload.set_running(pod, ADDRESS)
    workload.succeed(Role.TRAIN, 1, name="done", step="4", total_steps="4", goodput="0.8")
    workload.succeed(Role.MERGE, name="done")
    workload.wait_for("Finished", name="done")
    workload.wait_for("Finished", name="broken")

    def counted(query: str, number: float) -> bool:
        return [float(one["value"][1]) for one in prometheus.query(query)] == [number]

    for query, number in (
        (f'sum(finetune_jobs_total{{result="Succeeded",{ours}}})', 1.0),
        (f'sum(finetune_jobs_total{{result="Failed",{ours}}})', 1.0),
        (f"sum(finetune_restarts_total{{{ours}}})", 2.0),
    ):
        workload.wait(lambda query=query, number=number: counted(query, number), f"{query} = {number}")


def _has_data(prometheus: Prometheus, namespace: str) -> None:
    variables = {"$namespace": namespace, "$job": "tune", "$team": namespace}
    asked = [(board, *query) for board in dashboards.DASHBOARDS for query in dashboards.queries(board)]
    asked += [("rules", rule["record"], rule["record"]) for rule in rendered_rules()["groups"][0]["rules"]]
    missing: dict[tuple[str, str, str], Any] = {}

    def all_have_data() -> bool:
        missing.clear()
        for board, title, query in asked:
            expression = query
            for name, value in variables.items():
                expression = expression.replace(name, value)
            found = prometheus.query(expression)
            if not any(isfinite(float(one["value"][1])) for one in found):
                missing[board, title, expression] = found
        return not missing

    try:
        wait_until(all_have_data, "data for every query", 60)
    except Exception as error:
        error.add_note("\n".join(map(str, missing.items())))
        raise
    print(f"{len(asked)} queries have data")
    # What a new pod of the operator continues has no name of a pod.
    (series,) = prometheus.query(f'finetune_job_gpu_seconds{{name="tune",outcome="lost",namespace="{namespace}"}}')
    assert (series["metric"]["instance"], series["metric"]["pod"]) == ("tuning-finetune-operator",) * 2
    assert series["metric"]["namespace"] == namespace
    assert prometheus.query("finetune_leading")[0]["metric"]["pod"] == "operator-7d4"
