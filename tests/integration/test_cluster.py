"""The test cluster's control plane says why it fails, and an existing cluster takes its place."""

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from tests.support.documented import cluster_programs, path_with
from tests.support.existing_cluster import EXISTING_VARIABLE, ExistingCluster, existing_kubeconfig
from tests.support.living import living
from tools.cluster.binaries import PREBUILT_VARIABLE, Binaries
from tools.cluster.control_plane import ControlPlane
from tools.cluster.errors import ClusterError, wait_until

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.nightly
def test_existing_cluster_takes_the_place_of_an_own_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ControlPlane() as running:
        monkeypatch.setenv("PATH", path_with(tmp_path / "programs", cluster_programs(running)))
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
    wait_until(lambda: not living(processes), "the killed run's processes to end", 60)
    with ControlPlane():
        assert not Path(directory).exists()
