"""A pod is taken away, or its node: deleted, evicted, drained, without power, without network, or tainted."""

import json
from dataclasses import replace
from typing import Any

from tests.e2e.failures.case import Case, Expected, FailedAttempt
from tests.e2e.failures.scene import Scene
from tools.cluster.network import connect, disconnect
from tools.stack import NAMESPACE

_ACCELERATOR = "nvidia.com/gpu"
"""Key of the taint that an ordinary node with accelerators has."""
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Key of the taint by which somebody says that a node is off."""
_LOST = Expected("Succeeded", (FailedAttempt("train", "NodeLost", counted=False),), resumes=True)
_PREEMPTED = Expected("Succeeded", (FailedAttempt("train", "Preempted", counted=False),), resumes=True)
_TAKEN = Expected("Succeeded", (FailedAttempt("train", "Infrastructure", counted=False),), resumes=True)


def _train(scene: Scene, profile: dict[str, Any] | None = None) -> dict[str, Any]:
    """Start a job and wait for its checkpoint; the pod to be hit."""
    scene.start(profile=profile)
    scene.wait_for_checkpoint()
    return scene.training_pod_elsewhere()


def _deleted(scene: Scene) -> None:
    pod = _train(scene)
    scene.start_clock()
    scene.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
    scene.wait_for_next_step()


def _evicted(scene: Scene) -> None:
    name = _train(scene)["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
    scene.start_clock()
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    scene.stack.cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(eviction))
    scene.wait_for_next_step()


def _drained(scene: Scene) -> None:
    node = _train(scene)["spec"]["nodeName"]
    scene.at_the_end(lambda: scene.kubectl("uncordon", node))
    scene.start_clock()
    scene.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data")
    scene.wait_for_next_step()


def cut_power(scene: Scene) -> None:
    """Cut the other node's power; it comes back when the case is over."""
    node = scene.other_node
    scene.at_the_end(lambda: scene.wait(lambda: scene.is_ready(node), f"{node.place.name} to be Ready again"))
    scene.at_the_end(node.restore_power)
    scene.start_clock()
    node.cut_power()


def _power_cut_with_force(scene: Scene) -> None:
    _train(scene, profile={"forceDeletePodsOfLostNodes": True})
    cut_power(scene)
    scene.wait_for_next_step()


def power_cut_and_declared(scene: Scene) -> None:
    """Cut the other node's power and tell the cluster that nothing runs there any more, which releases its pods."""
    _train(scene)
    cut_power(scene)
    scene.wait_until_failed("NodeLost")
    scene.taint(scene.other_node, _OUT_OF_SERVICE, "NoExecute")
    scene.wait_for_next_step()


def _power_cut_and_back(scene: Scene) -> None:
    node = _train(scene)["spec"]["nodeName"]
    scene.start_clock()
    scene.other_node.cut_power()
    try:
        scene.wait_until_said("BlockedOnNode", node)
    finally:
        scene.start_clock()
        scene.other_node.restore_power()
    scene.wait_for_next_step()


def _node_restarted(scene: Scene) -> None:
    _train(scene)
    scene.start_clock()
    scene.other_node.cut_power()
    scene.other_node.restore_power()
    scene.wait_for_next_step()


def _partitioned(scene: Scene) -> None:
    _train(scene)
    place = scene.other_node.place
    scene.at_the_end(lambda: scene.wait(lambda: scene.is_ready(scene.other_node), f"{place.name} to be Ready again"))
    scene.at_the_end(lambda: connect(place))
    scene.start_clock()
    disconnect(place)
    scene.wait_until_failed("NodeLost")
    scene.start_clock()
    connect(place)
    scene.wait_for_next_step()


def _taint(scene: Scene) -> dict[str, Any]:
    """Make the other node one with accelerators, as clusters have them; the profile's settings that choose it."""
    name = scene.other_node.place.name
    scene.taint(scene.other_node, _ACCELERATOR, "NoSchedule")
    scene.at_the_end(lambda: scene.kubectl("label", "node", name, "accelerator-"))
    scene.kubectl("label", "node", name, "accelerator=yes")
    return {"nodeSelector": {"accelerator": "yes"}}


def tainted_tolerated(scene: Scene) -> None:
    """Train on a tainted node with a profile that tolerates the taint."""
    tolerations = [{"key": _ACCELERATOR, "operator": "Exists", "effect": "NoSchedule"}]
    scene.start(profile=_taint(scene) | {"pods": {"train": {"tolerations": tolerations}}})
    scene.start_clock()
    scene.wait_for_next_step()


def _tainted(scene: Scene) -> None:
    scene.start(profile=_taint(scene))
    scene.wait_until_said("Unschedulable")
    scene.start_clock()
    scene.untaint(scene.other_node, _ACCELERATOR)
    scene.wait_for_next_step()


CASES = (
    Case("pod-deleted", "`kubectl delete pod` of one rank's pod, which saves and says so", _PREEMPTED, _deleted),
    Case("pod-evicted", "one rank's pod evicted by the Eviction API", _TAKEN, _evicted),
    Case("node-drained", "`kubectl drain` of one node", _TAKEN, _drained),
    Case("power-cut", "power of one node cut, `forceDeletePodsOfLostNodes: true`", _LOST, _power_cut_with_force),
    Case("power-cut-declared", "power of one node cut; the node is tainted `out-of-service`", _LOST, power_cut_and_declared),
    Case(
        "power-cut-and-back",
        "power of one node cut; it comes back when the job waits for it",
        replace(_LOST, says="BlockedOnNode"),
        _power_cut_and_back,
        fixed=True,
    ),
    Case("node-restarted", "power of one node cut and back at once: no pod of it is given up", _TAKEN, _node_restarted),
    Case("partition", "one node without network until its pod is given up; then it heals", _LOST, _partitioned, fixed=True),
    Case(
        "node-tainted",
        "training pods meet a taint that the profile does not tolerate; it is taken away",
        Expected("Succeeded", says="Unschedulable"),
        _tainted,
        fixed=True,
    ),
    Case("node-tainted-tolerated", "the same taint, tolerated by the profile", Expected("Succeeded"), tainted_tolerated),
)
