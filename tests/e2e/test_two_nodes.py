"""A node loses its power: an elastic gang continues without it. `make failures` plays the other failures of nodes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune_job.names import LABEL_JOB
from tests.e2e.failures.case import FailedAttempt
from tests.e2e.failures.scene import Scene
from tools.stack import NAMESPACE, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1500)]
STEPS = 90
TRAINING = {"globalBatchSize": 32, "learningRate": "1e-3", "reduction": "Ordered"}
GANG = "elastic"
SPEC: dict[str, Any] = {
    "training": TRAINING | {"maxSteps": STEPS, "microBatchSize": 8},
    "method": {"type": "LoRA", "lora": {"r": 8, "loraDropout": "0.1"}},
    "parallelism": {"nodes": 2, "processesPerNode": 1, "elastic": {"minNodes": 1}},
    "checkpoint": {"everySteps": 5},
    "merge": {"enabled": True},
}
"""Two virtual ranks, long enough for a node to go and to come back."""


def test_a_gang_goes_on_without_a_lost_node_grows_when_it_is_back_and_ends_with_the_same_bytes(stack: Stack) -> None:
    apart = [{"labelSelector": {"matchLabels": {LABEL_JOB: GANG}}, "topologyKey": "kubernetes.io/hostname"}]
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}}
    profile = {
        "elastic": {"shrinkAfterSeconds": 10, "growAfterSeconds": 10},
        "forceDeletePodsOfLostNodes": True,
        "pods": {"train": {"affinity": affinity}},
    }
    gang = Scene(stack, GANG)
    try:
        gang.start(spec=SPEC, profile=profile)
        gang.wait_for_checkpoint()
        gang.training_pod_elsewhere()
        gang.start_clock()
        gang.other_node.cut_power()
        gang.at_the_end(lambda: None if gang.is_ready(gang.other_node) else gang.other_node.restore_power())
        gang.wait_for_next_step()
        print(f"{gang.seconds} s from the cut to the next trained step, on one node")
        gang.start_clock()
        gang.other_node.restore_power()
        gang.wait(lambda: gang.status()["attempts"][-1].get("nodes") == 2, "a gang on two nodes")
        gang.wait_for_next_step()
        print(f"{gang.seconds} s from the node's start to the next trained step, on two")
        seen = gang.finish()
        assert (seen.final, seen.failures, seen.resumes) == (
            "Succeeded",
            (FailedAttempt("train", "NodeLost", counted=False),),
            True,
        )
        attempts = [one for one in gang.status()["attempts"] if one.get("role", "train") == "train"]
        sizes = [(one["outcome"], one["nodes"], one["ranks"]) for one in attempts]
        print(sizes)
        assert (sizes[0], sizes[1][1:], sizes[-1]) == (("Failed", 2, 2), (1, 1), ("Succeeded", 2, 2))
        assert_one_node_gives_the_same(stack, gang)
    finally:
        gang.leave()


def assert_one_node_gives_the_same(stack: Stack, gang: Scene) -> None:
    """Undisturbed, on the other number of nodes, adapter and merged model: by the command for it, and by the bytes."""
    again = f"{gang.name}-reproduced"
    gang.at_the_end(lambda: gang.kubectl("delete", "finetunejob", again, "--ignore-not-found", "--timeout=200s"))
    program = Path(sys.executable).with_name("finetune")
    command = [program, "reproduce", gang.name, "--nodes", "1", "--wait", "--output", "json", "--namespace", NAMESPACE]
    done = subprocess.run(command, env=stack.cluster.environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    document = json.loads(done.stdout)
    assert (document["outcome"], document["comparedMerged"], document["runAgainAs"]) == ("same", True, f"{NAMESPACE}/{again}")
    first, (second,) = stack.claim("models-out") / gang.name, stack.claim("models-out").glob(f"{again}-*")
    for name in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert [pod["metadata"]["name"] for pod in stack.objects("pods") if "reader" in pod["metadata"]["name"]] == []
