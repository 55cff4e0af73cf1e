"""What `finetune explain JOB` proposes after a failure helps: a job breaks, and the fork that is copied from the answer succeeds
under the same conditions.

Two failures are not wholly real. DeviceOutOfMemory needs a GPU: the rank's report of it is put on the workspace, and the rank is
killed; supervisor, operator and forks are real. As NodeLost a job is given up after fifty lost attempts without a new checkpoint:
the last one is a power cut, the others are written into the job's status. Preempted and Infrastructure have the same patch. They
cannot be had without a checkpoint: a rank that is told of its end saves first.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.layout import WorkspaceLayout
from finetune_job.names import Role, workspace_claim_name
from finetune_trainer.processes.start import name_of_process
from finetune_trainer.ranks.reports import rank_process_name, rank_report_name
from tests.e2e.failures.scene import Scene
from tools.cluster.cgroups import processes_of_pod
from tools.cluster.processes import run_command
from tools.quickstart import make_model
from tools.stack import NAMESPACE, Stack
from tools.volumes import bound_claim, storage_class, volume

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600)]
BIN = Path(sys.executable).parent
TRAINING: dict[str, Any] = {"maxSteps": 6, "globalBatchSize": 8, "learningRate": "1e-3"}
SPEC: dict[str, Any] = {
    "training": TRAINING,
    "parallelism": {"nodes": 1, "processesPerNode": 1, "fsdp": {"version": 2}},
    "checkpoint": {"everySteps": 2},
    "run": {"maxRestarts": 0},
}
"""One rank, a few steps, and given up at the first failure."""
_PAUSE_SECONDS = 16
"""Of a rank: longer than the shortest stepTimeoutSeconds and what the watchdog takes, and shorter than twice that."""
_MEMORY_WITHOUT_A_COPY = "2250Mi"
"""Of 2.7 GB with the copy, and 1.8 GB without."""
_LOST_IN_A_ROW = 50
"""After so many the operator gives a job up (docs/reference/failures.md)."""


@pytest.fixture
def scene(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Scene]:
    # Named as the test: workspaces of jobs that were deleted stay on the claim.
    made = Scene(stack, re.sub(r"[^a-z]+", "-", request.node.name.removeprefix("test_"))[:32].strip("-"))
    try:
        yield made
    finally:
        made.leave()


def explained(scene: Scene, failure: str, phase: str = "Failed") -> str:
    """What the job's owner reads once it has failed so. The context's namespace is not that of the job."""
    seen = scene.finish()
    assert (seen.final, [one.failure for one in seen.failures][-1:]) == (phase, [failure]), json.dumps(scene.status(), indent=2)
    command = [BIN / "finetune", "explain", f"job/{scene.name}", "-n", NAMESPACE]
    environment = scene.stack.cluster.environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    print(done.stdout)
    return done.stdout


@contextmanager
def forked(scene: Scene, text: str, *settings: str) -> Iterator[Scene]:
    """The job that the copied line makes; the line has to change these settings."""
    (line,) = re.findall(r"^ +run: +(finetune fork .*)$", text, re.MULTILINE)
    assert [value for option, value in pairwise(shlex.split(line)) if option == "--set"] == list(settings)
    environment = dict(scene.stack.cluster.environment)
    environment["PATH"] = f"{BIN}:{environment['PATH']}"
    shell = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    (name,) = re.findall(rf"^{NAMESPACE}/(\S+): created$", done.stdout, re.MULTILINE)
    fork = Scene(scene.stack, name)
    fork.at_the_end(lambda: fork.kubectl("delete", "finetunejob", name, "--timeout=200s"))
    try:
        yield fork
    finally:
        fork.leave()


def assert_succeeds(fork: Scene, *failures: str) -> None:
    """To the last step, with its result, after no more than these failures."""
    seen = fork.finish()
    found = [one.failure for one in seen.failures]
    assert (seen.final, found) == ("Succeeded", list(failures)), json.dumps(fork.status(), indent=2)
    progress = fork.status()["progress"]
    assert progress["step"] == progress["totalSteps"] > 0
    assert (fork.stack.claim("models-out") / fork.name / "provenance.json").is_file()


def training_process(scene: Scene, rank: int) -> int:
    """Of a rank of the job's only training pod, on this machine."""

    def found() -> list[int]:
        uids = [pod["metadata"]["uid"] for pod in scene.stack.pods(scene.name, Role.TRAIN)]
        return [pid for uid in uids for pid in processes_of_pod(uid) if name_of_process(pid) == rank_process_name(rank)]

    (pid,) = scene.wait(found, f"the process of rank {rank}")
    return int(pid)


def test_a_rate_that_diverges(scene: Scene) -> None:
    # An exponent that was lost. Half of this rate diverges as well.
    scene.start(SPEC | {"training": TRAINING | {"learningRate": "20"}})
    text = explained(scene, "NonFinite")
    with forked(scene, text, "spec.training.learningRate=0.0002") as fork:
        assert_succeeds(fork)


def pause_a_rank(scene: Scene) -> None:
    """In the middle of its training, as one on a slow disk or a busy node."""
    scene.wait(lambda: scene.last_step() >= 2, "some steps")
    process = training_process(scene, 1)
    os.kill(process, signal.SIGSTOP)
    try:
        time.sleep(_PAUSE_SECONDS)
    finally:
        with suppress(ProcessLookupError):  # ended with its gang
            os.kill(process, signal.SIGCONT)


def test_a_step_that_takes_too_long(scene: Scene) -> None:
    two_ranks = SPEC["parallelism"] | {"processesPerNode": 2}
    scene.start(SPEC | {"parallelism": two_ranks, "training": TRAINING | {"maxSteps": 60, "stepTimeoutSeconds": 10}})
    pause_a_rank(scene)
    text = explained(scene, "Stalled")
    with forked(scene, text, "spec.training.stepTimeoutSeconds=20") as fork:
        pause_a_rank(fork)
        assert_succeeds(fork)


def test_memory_for_a_copy_of_the_state(scene: Scene) -> None:
    """Of 75 million parameters, from which checkpoints are written while training continues: 0.9 GB."""
    pairs = (scene.stack.claim("data") / "train.jsonl").read_text().splitlines()
    model = scene.stack.claim("models") / scene.name
    scene.at_the_end(lambda: shutil.rmtree(model))
    larger = {"hidden_size": 640, "intermediate_size": 1760, "num_hidden_layers": 16}
    make_model(model, [json.loads(pair)["prompt"] for pair in pairs], larger, "500MB")
    for path in (model, *model.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    one_by_one = {"maxSteps": 3, "globalBatchSize": 1, "microBatchSize": 1, "learningRate": "1e-5"}
    spec = {"model": {"source": f"pvc://models/{scene.name}"}, "method": {"type": "Full"}, "training": one_by_one}
    resources = scene.default_profile()["resources"]
    train = resources[Role.TRAIN] | {"memory": _MEMORY_WITHOUT_A_COPY}
    scene.start(SPEC | spec, profile={"resources": resources | {Role.TRAIN.value: train}})
    text = explained(scene, "HostOutOfMemory")
    with forked(scene, text, "spec.checkpoint.asynchronous=false") as fork:
        assert_succeeds(fork)


def small_volume(scene: Scene, name: str, mebibytes: int, class_name: str = "") -> Path:
    """A file system of this size on the first node, as a volume; where it is seen from here."""
    node = scene.stack.cluster.node
    directory = scene.stack.claim(name)
    directory.mkdir()
    scene.at_the_end(directory.rmdir)
    run_command(*node.command("mount", "-t", "tmpfs", "-o", f"size={mebibytes}M,mode=0755", "tmpfs", directory))
    scene.at_the_end(lambda: run_command(*node.command("umount", directory)))
    document = volume(NAMESPACE, name, directory, storage_class=class_name, size=f"{mebibytes}Mi")
    only_here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node.place.name]}
    document["spec"]["nodeAffinity"]["required"] = {"nodeSelectorTerms": [{"matchExpressions": [only_here]}]}
    scene.stack.apply(document)
    scene.at_the_end(lambda: scene.kubectl("delete", "pv", document["metadata"]["name"]))
    return Path(f"/proc/{node.first_process()}/root", directory.relative_to("/"))


def fill(scene: Scene, directory: Path, mebibytes_left: int) -> None:
    """Somebody else's file takes the room, after preflight has seen that there is enough."""
    scene.wait(lambda: scene.stack.batch_jobs(scene.name, Role.TRAIN), "the training Job")
    free = shutil.disk_usage(directory).free
    with (directory / "of-somebody-else").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - mebibytes_left * 2**20)


MANY_STEPS = TRAINING | {"maxSteps": 60}


def test_many_checkpoints_on_a_full_claim(scene: Scene) -> None:
    directory = small_volume(scene, scene.name, 40)
    scene.stack.apply(bound_claim(NAMESPACE, scene.name))
    scene.at_the_end(lambda: scene.kubectl("delete", "pvc", scene.name))
    checkpoint = {"everySteps": 2, "keep": 20}
    scene.start(SPEC | {"training": MANY_STEPS, "checkpoint": checkpoint, "workspace": {"claimName": scene.name}})
    fill(scene, directory, mebibytes_left=8)
    text = explained(scene, "DiskFull", "Stalled")
    (folder, claim), *_ = re.findall(r"remove the folder (\S+)\s+of\s+claim\s+(\S+):", " ".join(text.split()))
    assert claim == scene.name
    shutil.rmtree(directory / folder)
    with forked(scene, text, "spec.checkpoint.keep=2") as fork:
        assert_succeeds(fork)


def test_a_small_claim_of_the_job(scene: Scene) -> None:
    """The operator makes a claim for each job: that of the fork is as large as its patch says."""
    scene.stack.apply(storage_class(scene.name))
    scene.at_the_end(lambda: scene.kubectl("delete", "storageclass", scene.name))
    directory = small_volume(scene, f"{scene.name}-small", 40, scene.name)
    small_volume(scene, f"{scene.name}-large", 1024, scene.name)
    workspace = {"volumeClaimTemplate": {"storage": "40Mi", "storageClassName": scene.name, "accessMode": "ReadWriteMany"}}
    claims = [workspace_claim_name(name) for name in (scene.name, f"{scene.name}-2")]
    scene.at_the_end(lambda: scene.kubectl("delete", "pvc", *claims, "--ignore-not-found"))
    scene.start(SPEC | {"training": MANY_STEPS, "workspace": workspace})
    fill(scene, directory, mebibytes_left=1)
    text = explained(scene, "DiskFull", "Stalled")
    with forked(scene, text, "spec.workspace.volumeClaimTemplate.storage=1Gi") as fork:
        assert_succeeds(fork)


def checkpoints(scene: Scene) -> list[str]:
    return sorted(path.name for path in scene.stack.workspace(scene.name).glob("checkpoints/step-*"))


def test_losses_without_a_checkpoint(scene: Scene) -> None:
    """The fork is hit twice: after the first loss it saves more often than everySteps says, and continues from there."""
    node = scene.other_node
    settings = {"training": MANY_STEPS | {"maxSteps": 150}, "checkpoint": {"everySteps": 1000}, "run": {"maxRestarts": 2}}
    profile = {"forceDeletePodsOfLostNodes": True, "nodeSelector": {"kubernetes.io/hostname": node.place.name}}
    scene.start(SPEC | settings, profile=profile)
    scene.wait(lambda: scene.last_step() >= 2, "some steps")
    lost = {"status": {"restarts": {"uncounted": _LOST_IN_A_ROW, "inARow": _LOST_IN_A_ROW}}}
    patch = ("--subresource", "status", "--type", "merge", "--patch", json.dumps(lost))
    scene.kubectl("patch", "finetunejob", scene.name, *patch)
    node.cut_power()
    try:
        text = explained(scene, "NodeLost", "Stalled")
    finally:
        node.restore_power()
    scene.wait(lambda: scene.is_ready(node), f"{node.place.name} to be Ready again")
    with forked(scene, text, "spec.checkpoint.adaptive=true") as fork:
        fork.wait(lambda: fork.last_step() >= 5, "some steps")
        assert checkpoints(fork) == []
        kill_rank(fork)
        fork.wait_for_next_step()
        fork.wait(lambda: checkpoints(fork), "a checkpoint")
        kill_rank(fork)
        fork.wait_for_next_step()
        assert fork.finish().resumes
        assert_succeeds(fork, "Internal", "Internal")


def kill_rank(scene: Scene) -> None:
    scene.start_clock()
    os.kill(training_process(scene, 0), signal.SIGKILL)


@pytest.mark.parametrize(
    ("settings", "data", "proposed"),
    [
        ({"microBatchSize": 4}, {}, "spec.training.microBatchSize=2"),
        ({"microBatchSize": 1}, {}, "spec.training.activationCheckpointing=Full"),
        ({"microBatchSize": 1, "activationCheckpointing": "Full"}, {"maxSequenceLength": 512}, "spec.data.maxSequenceLength=256"),
    ],
    ids=["batch", "activations", "length"],
)
def test_device_out_of_memory(scene: Scene, settings: dict[str, Any], data: dict[str, Any], proposed: str) -> None:
    scene.start(SPEC | {"training": TRAINING | settings, "data": scene.example()["data"] | data})
    report_out_of_memory(scene)
    text = explained(scene, "DeviceOutOfMemory")
    with forked(scene, text, proposed) as fork:
        assert_succeeds(fork)


def report_out_of_memory(scene: Scene) -> None:
    """Leave the report that a rank writes when its GPU has no memory left, and end the rank."""
    process = training_process(scene, 0)
    os.kill(process, signal.SIGSTOP)
    report = TerminationReport(
        role=Role.TRAIN,
        outcome=Outcome.FAILED,
        failure=FailureClass.DEVICE_OUT_OF_MEMORY,
        message="CUDA out of memory. Tried to allocate 2.00 GiB.",
        rank=0,
        node_rank=0,
        step=1,
        time=time.time(),
    )
    directory = WorkspaceLayout(scene.stack.workspace(scene.name)).reports(Role.TRAIN, 0)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / rank_report_name(0)).write_text(report.model_dump_json())
    os.kill(process, signal.SIGKILL)
