"""A gang of one pod runs its next attempt in that pod: its container is started again by a real kubelet, and the bytes are those
of a gang that nobody disturbed.
"""

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from finetune_job.names import LABEL_ATTEMPT, Role
from finetune_trainer.processes.start import name_of_process
from finetune_trainer.ranks.reports import rank_process_name
from tests.e2e.failures.case import FailedAttempt
from tests.e2e.failures.scene import SPEC, Scene
from tests.support.documented import as_written
from tools.cluster.cgroups import processes_of_pod
from tools.stack import NAMESPACE, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
ONE_POD: dict[str, Any] = {"parallelism": {"nodes": 1, "processesPerNode": 2, "fsdp": {"version": 2}}}


FAILED = FailedAttempt("train", "Internal", counted=True)


@contextmanager
def playing(stack: Stack, name: str) -> Iterator[Scene]:
    found = Scene(stack, name)
    try:
        yield found
    finally:
        found.leave()


def kill_a_rank(scene: Scene, pod: dict[str, Any]) -> None:
    names = {rank_process_name(rank): rank for rank in range(2)}
    ranks = {names[name]: pid for pid in processes_of_pod(pod["metadata"]["uid"]) if (name := name_of_process(pid)) in names}
    assert sorted(ranks) == [0, 1]
    scene.start_clock()
    os.kill(ranks[1], signal.SIGKILL)


def adapter(scene: Scene) -> bytes:
    (found,) = scene.stack.directory.glob(f"claims/models-out/{scene.name}/adapter/adapter_model.safetensors")
    return Path(found).read_bytes()


def in_the_same_pod(scene: Scene, steps: int) -> dict[str, Any]:
    """A job whose rank is killed, and which trains on in its pod; the pod, as it is then."""
    training = {"training": SPEC["training"] | {"maxSteps": steps}}
    scene.start(ONE_POD | training)
    scene.wait_for_checkpoint()
    (pod,) = scene.stack.pods(scene.name, Role.TRAIN)
    kill_a_rank(scene, pod)
    scene.wait_for_next_step()
    print(f"{scene.seconds:.1f} s from the kill to the next trained step, in the same pod")
    (same,) = scene.stack.pods(scene.name, Role.TRAIN)
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert (same["metadata"]["labels"][LABEL_ATTEMPT], same["status"]["containerStatuses"][0]["restartCount"]) == ("1", 1)
    return same


def attempts_of_training(scene: Scene) -> list[tuple[int, str, bool]]:
    """Number, outcome, and whether the next one ran in the same pod."""
    attempts = [one for one in scene.status()["attempts"] if one.get("role", "train") == "train"]
    return [(one["number"], one["outcome"], one.get("continued", False)) for one in attempts]


def test_a_killed_rank_is_followed_by_an_attempt_in_the_same_pod(stack: Stack) -> None:
    with playing(stack, "same-pod") as scene:
        pod = in_the_same_pod(scene, steps=30)
        place = f"{pod['metadata']['name']} --namespace {NAMESPACE}"
        command = as_written("kubectl logs POD --previous", {"POD": place})
        first = subprocess.run(shlex.split(command), env=stack.cluster.environment, capture_output=True, text=True, check=True)
        assert "Signal 9 (SIGKILL)" in first.stdout + first.stderr
        seen = scene.finish()
        assert (seen.final, seen.failures, seen.resumes) == ("Succeeded", (FAILED,), True)
        assert attempts_of_training(scene) == [(0, "Failed", True), (1, "Succeeded", False)]
        assert {one["metadata"]["name"] for one in stack.batch_jobs(scene.name, Role.TRAIN)} == {f"{scene.name}-train-0"}


@pytest.mark.nightly
def test_a_second_killed_rank_is_followed_by_a_new_pod_and_the_bytes_are_those_of_an_undisturbed_gang(stack: Stack) -> None:
    with playing(stack, "second-pod") as scene:
        pod = in_the_same_pod(scene, steps=60)
        kill_a_rank(scene, pod)
        scene.wait_for_next_step()
        print(f"{scene.seconds:.1f} s from the second kill, in a new pod after a pause")
        (other,) = stack.pods(scene.name, Role.TRAIN)
        assert other["metadata"]["uid"] != pod["metadata"]["uid"]
        assert other["metadata"]["labels"][LABEL_ATTEMPT] == "2"
        seen = scene.finish()
        assert (seen.final, seen.failures, seen.resumes) == ("Succeeded", (FAILED, FAILED), True)
        assert attempts_of_training(scene) == [(0, "Failed", True), (1, "Failed", False), (2, "Succeeded", False)]
        first = next(one for one in scene.status()["attempts"] if one.get("role", "train") == "train")
        assert "rank 1 was killed by signal 9" in first["message"]
        disturbed = adapter(scene)
    with playing(stack, "undisturbed-pod") as scene:
        scene.start(ONE_POD)
        assert scene.finish().final == "Succeeded"
        assert adapter(scene) == disturbed
