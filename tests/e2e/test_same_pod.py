"""A gang of one pod runs its next attempt in that pod: its container is started again by a real kubelet, and the bytes are those
of a gang that nobody disturbed.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_job.names import LABEL_ATTEMPT, Role
from finetune_trainer.processes.start import name_of_process
from finetune_trainer.ranks.reports import rank_process_name
from tests.e2e.failures.case import FailedAttempt
from tests.e2e.failures.scene import Scene
from tests.support.cluster.cgroups import processes_of_pod
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
ONE_POD: dict[str, Any] = {"parallelism": {"nodes": 1, "processesPerNode": 2, "fsdp": {"version": 2}}}


@pytest.fixture
def scene(stack: Stack) -> Iterator[Scene]:
    found = Scene(stack, "same-pod")
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


def test_a_killed_rank_is_followed_by_an_attempt_in_the_same_pod_and_a_second_one_by_a_new_pod(
    scene: Scene, stack: Stack
) -> None:
    scene.start(ONE_POD)
    scene.wait_for_checkpoint()
    (pod,) = stack.pods(scene.name, Role.TRAIN)
    kill_a_rank(scene, pod)
    scene.wait_for_next_step()
    print(f"{scene.seconds:.1f} s from the kill to the next trained step, in the same pod")
    (same,) = stack.pods(scene.name, Role.TRAIN)
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert (same["metadata"]["labels"][LABEL_ATTEMPT], same["status"]["containerStatuses"][0]["restartCount"]) == ("1", 1)

    kill_a_rank(scene, same)
    scene.wait_for_next_step()
    print(f"{scene.seconds:.1f} s from the second kill, in a new pod")
    (other,) = stack.pods(scene.name, Role.TRAIN)
    assert other["metadata"]["uid"] != pod["metadata"]["uid"]
    assert other["metadata"]["labels"][LABEL_ATTEMPT] == "2"

    seen = scene.finish()
    failed = FailedAttempt("train", "Internal", counted=True)
    assert (seen.final, seen.failures, seen.resumes) == ("Succeeded", (failed, failed), True)
    attempts = [one for one in scene.status()["attempts"] if one.get("role", "train") == "train"]
    assert [(one["number"], one["outcome"], one.get("continued", False)) for one in attempts] == [
        (0, "Failed", True),
        (1, "Failed", False),
        (2, "Succeeded", False),
    ]
    assert "killed by signal 9" in attempts[0]["message"] or "SIGKILL" in attempts[0]["message"]
    disturbed = adapter(scene)
    scene.leave()

    undisturbed = Scene(stack, "other-pod")
    try:
        undisturbed.start(ONE_POD)
        assert undisturbed.finish().final == "Succeeded"
        assert adapter(undisturbed) == disturbed
    finally:
        undisturbed.leave()
