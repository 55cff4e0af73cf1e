"""The supervisor of a gang of one pod starts killed ranks again, at most twice in a pod, on a real node; the bytes are those of a
gang that nobody disturbed.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from finetune_job.names import Role
from finetune_trainer.processes.start import name_of_process
from finetune_trainer.ranks.reports import rank_process_name
from tests.e2e.failures.case import FailedAttempt
from tests.e2e.failures.scene import SPEC, Scene
from tools.cluster.cgroups import processes_of_pod
from tools.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(900)]
ONE_POD: dict[str, Any] = {"parallelism": {"nodes": 1, "processesPerNode": 2, "fsdp": {"version": 2}}}


@contextmanager
def playing(stack: Stack, name: str) -> Iterator[Scene]:
    scene = Scene(stack, name)
    try:
        yield scene
    finally:
        scene.leave()


def kill_a_rank(scene: Scene, pod: dict[str, Any]) -> None:
    names = {rank_process_name(rank): rank for rank in range(2)}
    ranks = {names[name]: pid for pid in processes_of_pod(pod["metadata"]["uid"]) if (name := name_of_process(pid)) in names}
    assert sorted(ranks) == [0, 1]
    scene.start_clock()
    os.kill(ranks[1], signal.SIGKILL)


def adapter(scene: Scene) -> bytes:
    (path,) = scene.stack.directory.glob(f"claims/models-out/{scene.name}/adapter/adapter_model.safetensors")
    return path.read_bytes()


def test_the_third_killed_rank_is_followed_by_a_new_pod_and_the_bytes_are_those_of_an_undisturbed_gang(stack: Stack) -> None:
    with playing(stack, "third-pod") as scene:
        scene.start(ONE_POD | {"training": SPEC["training"] | {"maxSteps": 60}})
        scene.wait_for_checkpoint()
        (pod,) = stack.pods(scene.name, Role.TRAIN)
        for number in (1, 2):
            kill_a_rank(scene, pod)
            scene.wait_for_step_after_restart_in_pod(number)
            print(f"{scene.seconds:.1f} s from kill {number} to the next trained step, in the same pod")
        (same,) = stack.pods(scene.name, Role.TRAIN)
        assert same["metadata"]["uid"] == pod["metadata"]["uid"]
        assert same["status"]["containerStatuses"][0]["restartCount"] == 0
        kill_a_rank(scene, pod)
        scene.wait_for_next_step()
        print(f"{scene.seconds:.1f} s from the third kill, in a new pod after a pause")
        (other,) = stack.pods(scene.name, Role.TRAIN)
        assert other["metadata"]["uid"] != pod["metadata"]["uid"]
        seen = scene.finish()
        failed = FailedAttempt("train", "Internal", counted=True)
        assert (seen.final, seen.failures, seen.resumes) == ("Succeeded", (failed,), True)
        first, second = [attempt for attempt in scene.status()["attempts"] if attempt.get("role", "train") == "train"]
        assert (first["outcome"], second["outcome"], second.get("restarts", [])) == ("Failed", "Succeeded", [])
        said = [(restart["failure"], restart["message"], restart["rank"]) for restart in first["restarts"]]
        assert said == [("Internal", "rank 1 was killed by signal 9", 1)] * 2
        assert scene.status()["restarts"]["counted"] == 3
        disturbed = adapter(scene)
    with playing(stack, "undisturbed-pod") as scene:
        scene.start(ONE_POD)
        assert scene.finish().final == "Succeeded"
        assert adapter(scene) == disturbed
