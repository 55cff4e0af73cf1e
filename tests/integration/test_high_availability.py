"""One replica of a release works, and a server that goes away ends nothing: on a real API server, with real processes."""

import signal

import pytest

from finetune_job.names import Role
from tests.integration.conftest import Installed, OperatorFactory
from tests.integration.workload import Workload
from tools.cluster.control_plane import ControlPlane
from tools.cluster.errors import wait_until

pytestmark = pytest.mark.integration
AWAY_SECONDS = 30
"""Longer than the lease lasts, and than kopf has patience by default."""


def test_leader_that_was_stopped_until_another_led_ends_without_a_write(workload: Workload, operator: OperatorFactory) -> None:
    first = operator("first")
    first.wait_for_line("ready")
    second = operator("second")
    wait_until(lambda: second.fetch("/readyz")[0] == 200, "the standby to be ready", 60)
    workload.apply()
    workload.wait_for_pods(Role.PREFLIGHT)
    # No node has room for the pod: once that is said and logged, the leader has nothing more to do.
    wait_until(lambda: any("Unschedulable" in str(line) for line in first.lines("decided")), "the leader to be at rest", 60)
    decided = len(first.lines("decided"))
    first.process.send_signal(signal.SIGSTOP)
    second.wait_for_line("ready")
    workload.succeed(Role.PREFLIGHT)
    workload.wait_for_pods(Role.TRAIN)
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(120) == 1
    assert first.lines("lease lost: another replica may lead now, so this one ends")
    assert len(first.lines("decided")) == decided
    assert len(workload.batch_jobs(Role.TRAIN)) == 1


def test_api_server_that_is_away_ends_nothing(installed: Installed, workload: Workload, operator: OperatorFactory) -> None:
    if not isinstance(installed.cluster, ControlPlane):
        pytest.skip("the API server of an existing cluster is not ours to stop")
    server = next(item for item in installed.cluster.components if item.name == "kube-apiserver")
    process = operator()
    process.wait_for_line("ready")
    workload.apply()
    (pod,) = workload.wait_for_pods(Role.PREFLIGHT)
    server.process.send_signal(signal.SIGSTOP)
    try:
        wait_until(
            lambda: any(line["age_seconds"] > AWAY_SECONDS for line in process.lines("lease not renewed")),
            f"the lease to be {AWAY_SECONDS} s old",
            120,
        )
        assert process.fetch("/healthz")[0] == 200
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert pod["metadata"]["uid"]
    workload.succeed(Role.PREFLIGHT)
    workload.wait_for_pods(Role.TRAIN)
    assert process.process.poll() is None
    assert len(process.lines("leading")) == 1
