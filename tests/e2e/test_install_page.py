"""docs/how-to/platform/install.md and the chart's README on a node: helm as a reader types it, and an operator that runs.

tests/integration/test_pages.py follows the page, too, where no pod runs, and looks at what is in the cluster afterwards. Here the
operator's image is on the node under the name that the chart gives it, as if a registry had served it.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.documented import ROOT, Reader, blocks_of, cluster_programs, path_with
from tools import images
from tools.cluster.errors import wait_until
from tools.cluster.node_cluster import NodeCluster
from tools.cluster.requirements import unsupported_reason

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1800)]
CHART = ROOT / "charts/finetune-operator"
PAGE = ROOT / "docs/how-to/platform/install.md"


@pytest.fixture
def cluster() -> Iterator[NodeCluster]:
    reason = unsupported_reason()
    if reason is not None:
        pytest.skip(f"no real node here: {reason}")
    operator = images.build("operator")
    with NodeCluster() as cluster:
        name = f"docker.io/library/finetune-operator:{yaml.safe_load((CHART / 'Chart.yaml').read_text())['appVersion']}"
        if not cluster.has_image(operator.reference):
            with operator.archive(cluster.node.images.blobs()) as archive:
                cluster.load_image(archive, operator.reference)
        cluster.node.images.tag(operator.reference, name)
        yield cluster
        cluster.node.images.untag(name)


@pytest.fixture
def reader(cluster: NodeCluster, tmp_path: Path) -> Reader:
    on_path = path_with(tmp_path / "programs", cluster_programs(cluster))
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout/charts").symlink_to(ROOT / "charts")
    return Reader(tmp_path / "checkout", {**cluster.environment, "PATH": on_path}, patience_seconds=600.0)


def running(cluster: NodeCluster) -> list[str]:
    """Namespaces with an operator that is ready."""
    found = json.loads(cluster.kubectl("get", "deployments", "--all-namespaces", "--output", "json"))["items"]
    return sorted(one["metadata"]["namespace"] for one in found if one["status"].get("readyReplicas") == 1)


def test_install_upgrade_and_uninstall_on_a_node_as_they_are_written(cluster: NodeCluster, reader: Reader) -> None:
    """The chart's README has two of the page's commands."""
    (of_chart,) = blocks_of(CHART / "README.md")
    of_page = [command for block in blocks_of(PAGE) for command in block.commands]
    assert of_chart.commands == [command for command in of_page if command in of_chart.commands]
    for namespace in ("research", "team-a"):
        cluster.kubectl("create", "namespace", namespace)
    for block in blocks_of(PAGE):
        try:
            said = reader.run(PAGE, block)
        except AssertionError:
            print(cluster.kubectl("get", "pods", "--all-namespaces"))
            print(cluster.kubectl("logs", "--namespace", "finetune-system", "--selector", "app.kubernetes.io/instance=finetune"))
            raise
        print(f"{block.text}{said}")
        if block.text.startswith("helm upgrade finetune") or "helm rollback" in block.text:
            assert running(cluster) == ["finetune-system"]
        if block.text.startswith("helm test"):
            assert re.search(r"Phase: +Succeeded", said), said
        if block.text.startswith("helm uninstall"):
            assert running(cluster) == []
            assert "finetunejobs.finetune.dev" in cluster.kubectl("get", "customresourcedefinitions")
        if block.text.startswith("helm install tuning"):
            assert running(cluster) == ["tuning-system"]
    wait_until(lambda: running(cluster) == ["team-a-system", "tuning-system"], "both releases to serve their namespaces", 180)
