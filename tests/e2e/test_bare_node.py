"""The test cluster's real nodes: they run pods, which find each other and the API server, and keep their images.

That they leave nothing behind is checked when `node_cluster` ends. This file's name puts it before the tests that share
nodes with the operator installed until the session's end: a machine holds one cluster with nodes at a time.
"""

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.pod_network import Answer, listening, node_namespace, pod_namespace, reached_from
from tools.cluster.errors import ClusterError, wait_until
from tools.cluster.images import write_program_image
from tools.cluster.network import connect, disconnect, reserve_machine
from tools.cluster.node_cluster import NodeCluster

pytest_plugins = ["tests.support.cluster_fixtures"]
pytestmark = pytest.mark.e2e

GIGABYTE = 10**9


def probe_pod(name: str, image: str, *arguments: str, node: str | None = None) -> dict[str, Any]:
    container = {"name": "probe", "image": image, "args": list(arguments)}
    where = {"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "pair"}},
        "spec": {"hostname": name, "subdomain": "pair", "restartPolicy": "Never", "containers": [container], **where},
    }


def network_policy(name: str, selector: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """For both directions."""
    spec |= {"podSelector": selector, "policyTypes": ["Ingress", "Egress"]}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name}, "spec": spec}


def apply(cluster: NodeCluster, *objects: dict[str, Any]) -> None:
    cluster.kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))


def output_of_ended(cluster: NodeCluster, name: str) -> str:
    """Wait until a pod has ended well and return its log; delete it."""

    def phase() -> str:
        return cluster.kubectl("get", "pod", name, "-o", "jsonpath={.status.phase}")

    wait_until(lambda: phase() in {"Succeeded", "Failed"}, f"pod {name} to end", 180)
    log = cluster.kubectl("logs", name)
    assert phase() == "Succeeded", log
    cluster.kubectl("delete", "pod", name)
    return log


def node_status(cluster: NodeCluster, name: str) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(cluster.kubectl("get", "node", name, "-o", "json"))["status"]
    return status


def is_ready(cluster: NodeCluster, name: str) -> str:
    return next(str(one["status"]) for one in node_status(cluster, name)["conditions"] if one["type"] == "Ready")


def test_the_nodes_are_ready_and_offer_memory_for_training_pods(node_cluster: NodeCluster) -> None:
    for name in ("node-1", "node-2"):
        assert is_ready(node_cluster, name) == "True"
        allocatable = node_status(node_cluster, name)["allocatable"]["memory"]
        assert allocatable.endswith("Ki")
        assert int(allocatable.removesuffix("Ki")) * 1024 > 4 * GIGABYTE


def test_pods_of_two_nodes_find_each_other_by_the_headless_service(node_cluster: NodeCluster) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "pair"},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "pair"}},
    }
    first = probe_pod("rank-0", node_cluster.probe_image, "pause", node="node-1")
    name = "rank-0.pair.default.svc.cluster.local"
    second = probe_pod("rank-1", node_cluster.probe_image, "resolve", name, "120s", node="node-2")
    apply(node_cluster, service, first, second)

    resolved = output_of_ended(node_cluster, "rank-1").strip()

    assert resolved == node_cluster.kubectl("get", "pod", "rank-0", "-o", "jsonpath={.status.podIP}")
    knock = f"import socket; socket.create_connection(({resolved!r}, 9), timeout=5)"
    knocked = [str(one) for one in node_cluster.node_named("node-2").command(sys.executable, "-c", knock)]
    # Nothing listens there, and the pod itself says so.
    assert "ConnectionRefusedError" in subprocess.run(knocked, capture_output=True, text=True, check=False).stderr
    node_cluster.kubectl("delete", "pod/rank-0", "service/pair")


def test_network_policies_hold_while_they_are_enforced(node_cluster: NodeCluster) -> None:
    """What the attacks on running jobs rely on: without enforcement, or without a policy, the same connections are there."""
    server, near, far = (
        probe_pod(name, node_cluster.probe_image, "pause", node=node)
        for name, node in (("server", "node-1"), ("near", "node-1"), ("far", "node-2"))
    )
    pods = [
        one | {"metadata": {"name": one["metadata"]["name"], "labels": {"role": role}}}
        for one, role in ((server, "server"), (near, "guest"), (far, "guest"))
    ]
    apply(node_cluster, *pods)
    node_cluster.kubectl("wait", "pod/server", "pod/near", "pod/far", "--for=condition=Ready", "--timeout=60s")
    server, near, far = (json.loads(node_cluster.kubectl("get", "pod", name, "-o", "json")) for name in ("server", "near", "far"))
    address = server["status"]["podIP"]
    targets = {
        "open port": (address, 8000),
        "port without a listener": (address, 8001),
        "own kubelet": (node_cluster.node_named("node-1").place.address, 10250),
        "other kubelet": (node_cluster.node_named("node-2").place.address, 10250),
        "API server": ("10.96.0.1", 443),
    }

    def answers(pod: dict[str, Any]) -> list[Answer]:
        return list(reached_from(pod_namespace(pod), targets).values())

    everything: list[Answer] = ["open", "refused", "open", "open", "open"]
    nothing: list[Answer] = ["nothing"] * len(targets)
    with listening(pod_namespace(server), address, [8000]):
        apply(node_cluster, network_policy("deny", {}))
        assert (answers(near), answers(far)) == (everything, everything), "without an enforcer a policy stops nothing"
        with node_cluster.enforced_policies() as enforcer:
            assert (answers(near), answers(far)) == (nothing, nothing)
            assert reached_from(node_namespace(node_cluster.node.place), targets)["open port"] == "open", (
                "as the kubelet needs it"
            )

            guests = {"podSelector": {"matchLabels": {"role": "guest"}}}
            kubelets = [
                {"ipBlock": {"cidr": "172.30.0.0/24", "except": [f"{node_cluster.node_named('node-2').place.address}/32"]}}
            ]
            port = [{"protocol": "TCP", "port": 8000}]
            apply(
                node_cluster,
                network_policy("serve", {"matchLabels": {"role": "server"}}, ingress=[{"from": [guests], "ports": port}]),
                network_policy(
                    "call", guests["podSelector"], egress=[{"to": [{"podSelector": {}}], "ports": port}, {"to": kubelets}]
                ),
            )
            enforcer.settle()
            # The API server is at the bridge's address, which the block holds: a Service is judged by where it leads.
            allowed: list[Answer] = ["open", "nothing", "open", "nothing", "open"]
            assert (answers(near), answers(far)) == (allowed, allowed)

            node_cluster.kubectl("delete", "networkpolicy", "--all")
            enforcer.settle()
            assert (answers(near), answers(far)) == (everything, everything), "a pod that no policy selects is open"
            apply(node_cluster, network_policy("deny", {}))
            enforcer.settle()
        assert (answers(near), answers(far)) == (everything, everything), "an enforcer that has ended left rules behind"
    node_cluster.kubectl("delete", "networkpolicy/deny", "pod/server", "pod/near", "pod/far", "--grace-period=1")


@pytest.mark.nightly
def test_a_node_that_lost_its_power_comes_back_without_its_processes(node_cluster: NodeCluster) -> None:
    node = node_cluster.node_named("node-2")
    apply(node_cluster, probe_pod("lost", node_cluster.probe_image, "pause", node="node-2"))
    node_cluster.kubectl("wait", "pod/lost", "--for=condition=Ready", "--timeout=60s")
    processes = psutil.Process(node.first_process()).children(recursive=True)
    assert len(processes) > 1

    node.cut_power()
    assert [process for process in processes if process.is_running()] == []
    node.restore_power()

    ended = ("get", "pod", "lost", "-o", "jsonpath={.status.phase}")
    wait_until(lambda: node_cluster.kubectl(*ended) == "Failed", "the pod's end to be seen", 60)
    wait_until(lambda: is_ready(node_cluster, "node-2") == "True", "node-2 to be Ready", 60)
    node_cluster.kubectl("delete", "pod", "lost")


@pytest.mark.nightly
def test_a_node_without_its_cable_is_noticed_and_its_pods_go_on(node_cluster: NodeCluster) -> None:
    node = node_cluster.node_named("node-2")
    apply(node_cluster, probe_pod("cut-off", node_cluster.probe_image, "pause", node="node-2"))
    node_cluster.kubectl("wait", "pod/cut-off", "--for=condition=Ready", "--timeout=60s")
    container = json.loads(node_cluster.kubectl("get", "pod", "cut-off", "-o", "json"))["status"]["containerStatuses"][0]

    disconnect(node.place)
    try:
        wait_until(lambda: is_ready(node_cluster, "node-2") == "Unknown", "node-2 to be given up", 60)
        assert node.images.main_process(container["containerID"].rpartition("/")[2])
    finally:
        connect(node.place)

    wait_until(lambda: is_ready(node_cluster, "node-2") == "True", "node-2 to be back", 60)
    node_cluster.kubectl("delete", "pod", "cut-off", "--ignore-not-found")


def test_pod_reaches_the_api_server_as_its_service_account(node_cluster: NodeCluster) -> None:
    apply(node_cluster, probe_pod("client", node_cluster.probe_image, "api", "/api/v1/namespaces/default/pods"))

    answer = output_of_ended(node_cluster, "client")

    # Known by name, and refused only because nothing has been granted to it.
    assert answer.startswith("403 ")
    assert "system:serviceaccount:default:default" in answer


def test_nodes_and_pods_have_no_way_out(node_cluster: NodeCluster) -> None:
    for node in node_cluster.nodes:
        shown = subprocess.run(
            [str(one) for one in node.command("ip", "-json", "route", "show", "default")],
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(shown.stdout or "[]") == []


@pytest.mark.nightly
def test_new_tag_of_an_image_replaces_the_old_one(node_cluster: NodeCluster, tmp_path: Path) -> None:
    program = node_cluster.control_plane.binaries.probe
    run = uuid.uuid4().hex  # the node keeps its images from run to run
    old, new = (f"finetune-test.local/replaced:{run}-{tag}" for tag in ("old", "new"))
    for name, seconds in ((old, 10), (new, 20)):
        archive = tmp_path / "image.tar"
        write_program_image(archive, program, ["resolve", "localhost", f"{seconds}s"])
        node_cluster.node.images.load(archive, name)

    assert node_cluster.has_image(new)
    assert not node_cluster.has_image(old)
    assert node_cluster.has_image(node_cluster.probe_image)
    apply(node_cluster, probe_pod("replaced", new, node="node-1"))
    assert "127.0.0.1" in output_of_ended(node_cluster, "replaced")


def test_an_image_is_not_loaded_on_one_of_two_nodes(node_cluster: NodeCluster, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="load images before add_node"):
        node_cluster.load_image(tmp_path / "image.tar", "finetune-test.local/late:1")


def test_second_cluster_in_one_process_is_refused_at_once(node_cluster: NodeCluster) -> None:
    with pytest.raises(ClusterError, match="one machine holds one"):
        reserve_machine()


def test_more_nodes_than_the_cluster_was_made_for_are_refused(node_cluster: NodeCluster) -> None:
    with pytest.raises(ClusterError, match="raise most_nodes"):
        node_cluster.add_node()
