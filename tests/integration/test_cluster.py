"""The test cluster's control plane: it works, several run at once, it says why it fails, and it leaves nothing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from tests.support.cluster_traces import descendants
from tests.support.existing_cluster import EXISTING_VARIABLE, ExistingCluster, existing_kubeconfig
from tests.support.living import living
from tools.cluster.access import ClusterAccess
from tools.cluster.binaries import PREBUILT_VARIABLE, Binaries
from tools.cluster.control_plane import ControlPlane
from tools.cluster.errors import ClusterError, wait_until

pytest_plugins = ["tests.support.cluster_fixtures"]
pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]

INDEXED_JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "pair"},
    "spec": {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "registry.test/none:1"}]}},
    },
}


def test_job_controller_makes_the_pods_of_an_indexed_job(control_plane: ClusterAccess) -> None:
    control_plane.kubectl("create", "namespace", "indexed-job")
    try:
        wait_until(
            lambda: control_plane.kubectl("get", "serviceaccounts", "-n", "indexed-job", "-o", "name").strip(),
            "the namespace's default ServiceAccount",
            60,
        )
        control_plane.kubectl("apply", "-n", "indexed-job", "-f", "-", input=json.dumps(INDEXED_JOB))

        def indexes() -> list[str]:
            pods = json.loads(control_plane.kubectl("get", "pods", "-n", "indexed-job", "-o", "json"))["items"]
            return sorted(pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] for pod in pods)

        wait_until(lambda: indexes() == ["0", "1"], "one pod per completion index", 60)
        job = json.loads(control_plane.kubectl("get", "job", "pair", "-n", "indexed-job", "-o", "json"))
        assert job["spec"]["podReplacementPolicy"] == "Failed"
    finally:
        control_plane.kubectl("delete", "namespace", "indexed-job", "--wait=false")


def test_helm_reaches_the_cluster(control_plane: ClusterAccess) -> None:
    assert json.loads(control_plane.helm("list", "--namespace", "kube-public", "--output", "json")) == []


def test_failed_kubectl_call_shows_what_kubectl_said(control_plane: ClusterAccess) -> None:
    with pytest.raises(ClusterError, match='namespaces "absent" not found'):
        control_plane.kubectl("get", "namespace", "absent")


@pytest.mark.nightly
def test_two_control_planes_run_at_once_and_the_one_that_ends_leaves_nothing(control_plane: ClusterAccess) -> None:
    with ControlPlane() as second:
        processes = descendants(second)
        run = second.run.path
        assert len(processes) == 4
        second.kubectl("create", "namespace", "only-here")
        assert "only-here" not in control_plane.kubectl("get", "namespaces", "-o", "name")

    assert [process for process in processes if process.is_running()] == []
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    assert not run.exists()
    assert str(run) not in Path("/proc/self/mounts").read_text()
    assert "default" in control_plane.kubectl("get", "namespaces", "-o", "name")


@pytest.mark.nightly
def test_existing_cluster_takes_the_place_of_an_own_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ControlPlane() as running:
        for program, command in (("kubectl", f"{running.binaries.kube} kubectl"), ("helm", str(running.binaries.helm))):
            (tmp_path / program).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (tmp_path / program).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv(EXISTING_VARIABLE, str(running.kubeconfig))
        kubeconfig = existing_kubeconfig()
        assert kubeconfig == running.kubeconfig
        running.kubectl("create", "namespace", "seen-by-both")

        with ExistingCluster(kubeconfig) as cluster:
            assert "seen-by-both" in cluster.kubectl("get", "namespaces", "-o", "name")
            assert json.loads(cluster.helm("list", "--output", "json")) == []

        assert "seen-by-both" in running.kubectl("get", "namespaces", "-o", "name")


def test_existing_cluster_without_its_kubeconfig_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXISTING_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(ClusterError, match=f"{EXISTING_VARIABLE}=.*absent is no file"):
        existing_kubeconfig()


def test_component_that_ends_is_named_with_its_log_and_the_logs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for program in (field.name for field in fields(Binaries)):
        (tmp_path / program).write_text("#!/bin/sh\nif [ $1 = etcd ]; then exec sleep 600; fi\necho no such luck; exit 7\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv(PREBUILT_VARIABLE, str(tmp_path))
    failing = ControlPlane()

    with pytest.raises(ClusterError, match=r"(?s)kube-apiserver ended with exit code 7.*no such luck"), failing:
        pytest.fail("the control plane came up without an API server")

    assert [component.process.returncode for component in failing.components] == [-signal.SIGKILL, 7]
    assert not failing.run.path.exists()
    said = re.search(r"logs kept in (\S+)", capsys.readouterr().err)
    assert said is not None
    kept = Path(said[1])
    assert (kept / "kube-apiserver.log").read_text() == "no such luck\n"
    shutil.rmtree(kept)


@pytest.mark.nightly
def test_killed_test_run_leaves_no_process_and_its_directory_goes_with_the_next_run() -> None:
    script = (
        "import time\n"
        "from tools.cluster.control_plane import ControlPlane\n"
        "plane = ControlPlane().__enter__()\n"
        "print(plane.run.path, *(one.process.pid for one in plane.components), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as aborted:
        assert aborted.stdout is not None
        directory, *pids = aborted.stdout.readline().split()
        processes = [psutil.Process(int(pid)) for pid in pids]
        aborted.kill()

    assert len(processes) == 4
    wait_until(
        lambda: not living(processes),
        "the killed run's processes to end",
        60,
    )
    with ControlPlane():
        assert not Path(directory).exists()
