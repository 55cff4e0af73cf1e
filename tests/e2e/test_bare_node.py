"""The test cluster's real node: it runs pods, which find each other and the API server, and keeps its images.

That it leaves nothing behind is checked when `node_cluster` ends. This file's name puts it before the tests that share
a node with the operator installed until the session's end: a machine holds one node at a time.
"""

import json
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.errors import ClusterError, wait_until
from tests.support.cluster.images import write_program_image
from tests.support.cluster.network import reserve_node
from tests.support.cluster.node import NODE_NAME
from tests.support.cluster.single_node import SingleNodeCluster

pytest_plugins = ["tests.support.cluster.fixtures"]
pytestmark = pytest.mark.e2e

GIGABYTE = 10**9


def probe_pod(name: str, image: str, *arguments: str) -> dict[str, Any]:
    container = {"name": "probe", "image": image, "args": list(arguments)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "pair"}},
        "spec": {"hostname": name, "subdomain": "pair", "restartPolicy": "Never", "containers": [container]},
    }


def apply(cluster: SingleNodeCluster, *objects: dict[str, Any]) -> None:
    cluster.kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))


def output_of_ended(cluster: SingleNodeCluster, name: str) -> str:
    """Wait until a pod has ended well and return its log; delete it."""

    def phase() -> str:
        return cluster.kubectl("get", "pod", name, "-o", "jsonpath={.status.phase}")

    wait_until(lambda: phase() in {"Succeeded", "Failed"}, f"pod {name} to end", 180)
    log = cluster.kubectl("logs", name)
    assert phase() == "Succeeded", log
    cluster.kubectl("delete", "pod", name)
    return log


def test_node_is_ready_and_offers_memory_for_training_pods(node_cluster: SingleNodeCluster) -> None:
    node = json.loads(node_cluster.kubectl("get", "node", NODE_NAME, "-o", "json"))
    ready = [one["status"] for one in node["status"]["conditions"] if one["type"] == "Ready"]
    assert ready == ["True"]
    allocatable = node["status"]["allocatable"]["memory"]
    assert allocatable.endswith("Ki")
    assert int(allocatable.removesuffix("Ki")) * 1024 > 4 * GIGABYTE


def test_pods_find_each_other_by_the_headless_service(node_cluster: SingleNodeCluster) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "pair"},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "pair"}},
    }
    first = probe_pod("rank-0", node_cluster.probe_image, "pause")
    second = probe_pod("rank-1", node_cluster.probe_image, "resolve", "rank-0.pair.default.svc.cluster.local", "120s")
    apply(node_cluster, service, first, second)

    resolved = output_of_ended(node_cluster, "rank-1").strip()

    assert resolved == node_cluster.kubectl("get", "pod", "rank-0", "-o", "jsonpath={.status.podIP}")
    node_cluster.kubectl("delete", "pod/rank-0", "service/pair")


def test_pod_reaches_the_api_server_as_its_service_account(node_cluster: SingleNodeCluster) -> None:
    apply(node_cluster, probe_pod("client", node_cluster.probe_image, "api", "/api/v1/namespaces/default/pods"))

    answer = output_of_ended(node_cluster, "client")

    # Known by name, and refused only because nothing has been granted to it.
    assert answer.startswith("403 ")
    assert "system:serviceaccount:default:default" in answer


def test_node_and_pods_have_no_way_out(node_cluster: SingleNodeCluster) -> None:
    shown = subprocess.run(
        [str(one) for one in node_cluster.node.command("ip", "-json", "route", "show", "default")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(shown.stdout or "[]") == []


def test_new_tag_of_an_image_replaces_the_old_one(node_cluster: SingleNodeCluster, tmp_path: Path) -> None:
    program = node_cluster.control_plane.binaries.probe
    run = uuid.uuid4().hex  # the node keeps its images from run to run
    old, new = (f"finetune-test.local/replaced:{run}-{tag}" for tag in ("old", "new"))
    for name, seconds in ((old, 10), (new, 20)):
        archive = tmp_path / "image.tar"
        write_program_image(archive, program, ["resolve", "localhost", f"{seconds}s"])
        node_cluster.load_image(archive, name)

    assert node_cluster.has_image(new)
    assert not node_cluster.has_image(old)
    assert node_cluster.has_image(node_cluster.probe_image)
    apply(node_cluster, probe_pod("replaced", new))
    assert "127.0.0.1" in output_of_ended(node_cluster, "replaced")


def test_second_node_in_one_process_is_refused_at_once(node_cluster: SingleNodeCluster) -> None:
    with pytest.raises(ClusterError, match="one machine holds one"):
        reserve_node()
