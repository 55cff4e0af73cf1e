"""Lines of the pages that look after jobs and an operator of a cluster, run as they stand there, against two real nodes.

`job.yaml` is the quickstart's. JOB, NS and the like have values: the job, its namespace. What is run without a namespace finds
it in the kubeconfig, as a reader's does.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.documented import ROOT, as_written, blocks_of, cluster_programs, path_with
from tools.stack import NAMESPACE, Stack, host_and_port

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(2400)]
JOB = "documented"
GIVEN = {"JOB": JOB}
STEPS = 60


class Desk:
    """Somebody's terminal, in a directory with `job.yaml`."""

    def __init__(self, stack: Stack, directory: Path) -> None:
        self.directory = directory
        path = path_with(directory / "bin", cluster_programs(stack.cluster))
        kubeconfig = yaml.safe_load(stack.cluster.kubeconfig.read_text())
        for context in kubeconfig["contexts"]:
            context["context"]["namespace"] = NAMESPACE
        (directory / "kubeconfig").write_text(json.dumps(kubeconfig))
        self.environment = stack.cluster.environment | {
            "PATH": f"{Path(sys.executable).parent}:{path}",
            "KUBECONFIG": str(directory / "kubeconfig"),
        }

    @contextmanager
    def begun(self, line: str) -> Iterator[subprocess.Popen[str]]:
        """A command that continues by itself, until the body ends."""
        command = ["bash", "-c", f"exec {line}"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=self.directory, env=self.environment, text=True, **pipes) as process:
            try:
                yield process
            finally:
                process.terminate()

    def run(self, line: str, *, code: int = 0, seconds: float = 300) -> str:
        """What it prints."""
        command = ["bash", "-euo", "pipefail", "-c", line]
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == code, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def desk(stack: Stack, tmp_path: Path) -> Iterator[Desk]:
    made = Desk(stack, tmp_path)
    yield made
    stack.cluster.kubectl("delete", "finetunejobs", "--all", "--namespace", NAMESPACE, "--timeout=200s")


def write_job(directory: Path, **training: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples/quickstart-cluster.yaml").read_text())
    document["metadata"] = {"name": JOB}
    document["spec"]["training"] |= training
    document["spec"]["checkpoint"] = {"everySteps": 2}
    document["spec"]["preflight"] = {"rehearsal": "Skip"}
    document["spec"]["output"]["destination"] = f"pvc://models-out/{JOB}"
    # As JSON: see Stack.apply.
    (directory / "job.yaml").write_text(json.dumps(document))
    return document


def test_lines_for_jobs_of_a_cluster_are_run_as_they_are_written(stack: Stack, desk: Desk) -> None:
    """The lines of the page on jobs come first, then those of the pages on results and training, and of the runbooks."""
    write_job(desk.directory, maxSteps=STEPS)
    with (
        desk.begun(as_written("kubectl get ftj -w")) as watching,
        desk.begun(as_written("finetune submit job.yaml --watch")) as submitted,
    ):
        stack.wait(lambda: stack.objects("finetunejobs"), "the job", 60)
        assert desk.run(as_written("kubectl apply -f job.yaml"))
        stack.wait_for_step(JOB, 1)
        assert JOB in desk.run(as_written("finetune list -A"))
        assert JOB in desk.run(as_written("kubectl finetune list"))
        assert desk.run(as_written("finetune status JOB", GIVEN)).startswith(f"{NAMESPACE}/{JOB}: ")
        lines = desk.run(as_written("finetune logs JOB -f --rank 0", GIVEN)).splitlines()
        assert {line.partition("]")[0] for line in lines} == {"[rank 0"}
        assert any(line.endswith(f"exporting the checkpoint of step {STEPS}") for line in lines), lines
        said, _ = submitted.communicate(timeout=900)
        # "judged, then created; ends with the job's exit code"
        assert submitted.returncode == 0, said
        assert f"FineTuneJob {JOB}: accepted\n" in said
        assert f"\n{NAMESPACE}/{JOB}: created\n" in said
        assert f"{NAMESPACE}/{JOB}: Succeeded" in said
        watching.terminate()
        watched, _ = watching.communicate(timeout=60)
    # "shows step and loss"
    assert any({"NAME", "STEP", "LOSS"} <= set(line.split()) for line in watched.splitlines()), watched
    assert any(f"{STEPS}/{STEPS}" in line for line in watched.splitlines()), watched
    assert "Succeeded" in desk.run(as_written("kubectl get ftj -o wide"))
    assert "Succeeded" in desk.run(as_written("finetune explain job/JOB", GIVEN))
    assert "Succeeded" in desk.run(as_written("kubectl finetune explain job/JOB -n NS", GIVEN | {"NS": NAMESPACE}))
    assert "Phase:" in desk.run(as_written("kubectl -n NS describe finetunejob JOB", GIVEN | {"NS": NAMESPACE}))

    forked = yaml.safe_load(desk.run(as_written("finetune fork JOB --set training.learningRate=1e-5", GIVEN)))
    assert forked["spec"]["training"]["learningRate"] == "1e-5"
    line = "finetune fork JOB --from 400 --set training.learningRate=5e-5"
    forked = yaml.safe_load(desk.run(as_written(line, GIVEN | {"400": str(STEPS)})))
    assert forked["spec"]["training"]["learningRate"] == "5e-5"
    assert forked["metadata"]["name"] != JOB

    results = desk.directory / "results"
    desk.run(as_written("finetune download JOB DIR", GIVEN | {"DIR": str(results)}))
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=results, check=True)
    # Without --wait it is created, and the same command compares once it has ended: so does any that waits.
    assert "reproduced" in desk.run(as_written("kubectl finetune reproduce JOB", GIVEN))
    said = desk.run(as_written("finetune reproduce JOB --wait", GIVEN), seconds=900)
    assert "nothing differs" in said, said
    again = desk.run(as_written("kubectl finetune reproduce NAME --wait", {"NAME": JOB}), seconds=900)
    assert "nothing differs" in again, again

    page = ROOT / "docs/how-to/results.md"
    (keys,) = [block for block in blocks_of(page) if "signing.pub" in block.text and "genpkey" in block.text]
    desk.run(as_written(keys))
    secret = json.loads(stack.cluster.kubectl("get", "secret", "model-signing", "--namespace", NAMESPACE, "--output", "json"))
    assert list(secret["data"]) == ["signing.key"]
    stack.cluster.kubectl("delete", "secret", "model-signing", "--namespace", NAMESPACE)


def test_lines_about_an_installed_operator_are_run_as_they_are_written(stack: Stack, desk: Desk) -> None:
    address, port = host_and_port(stack.cluster.control_plane.server)
    # What goes into networkPolicy.apiServerCIDRs and apiServerPorts.
    line = "kubectl get endpointslices --namespace default --selector kubernetes.io/service-name=kubernetes"
    shown = desk.run(as_written(line)).splitlines()[1].split()
    assert (str(port) in shown, address in shown) == (True, True), shown
    assert "default" in desk.run(as_written("kubectl get finetuneprofiles"))
    for line, field in (
        ("kubectl explain finetunejob", "spec"),
        ("kubectl explain finetunejob.spec --recursive", "loraDropout"),
        ("kubectl explain finetuneprofile.spec", "trainerImage"),
        ("kubectl explain finetuneprofile.spec.pods", "train"),
    ):
        assert field in desk.run(as_written(line)), line
    for line, word in (
        ("finetune doctor --namespace team", ""),
        ("finetune doctor --namespace team-a", "team-a"),
        ("finetune doctor --namespace support", "support"),
        ("finetune doctor --namespace NAMESPACE", "NAMESPACE"),
    ):
        assert "network-policies" in desk.run(as_written(line, {word: NAMESPACE} if word else {})), line
