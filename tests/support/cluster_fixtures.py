"""pytest fixtures: clusters that tests share."""

from collections.abc import Iterator

import pytest

from tests.support.cluster_traces import descendants, traces_of
from tests.support.existing_cluster import ExistingCluster, existing_kubeconfig
from tools.cluster.access import ClusterAccess
from tools.cluster.control_plane import ControlPlane
from tools.cluster.node_cluster import NodeCluster
from tools.cluster.requirements import unsupported_reason


@pytest.fixture(scope="session")
def control_plane(request: pytest.FixtureRequest) -> Iterator[ClusterAccess]:
    """A control plane without nodes, or the cluster that KUBECONFIG_FOR_TESTS names."""
    existing = existing_kubeconfig()
    if existing is not None:
        with ExistingCluster(existing) as cluster:
            yield cluster
        return
    with ControlPlane() as own:
        yield own
        own.keep_logs = request.session.testsfailed > 0


@pytest.fixture(scope="module")
def node_cluster(request: pytest.FixtureRequest) -> Iterator[NodeCluster]:
    """A cluster with two real nodes and nothing on them. Its end is a test of its own: nothing of it may be left."""
    reason = unsupported_reason()
    if reason is not None:
        pytest.skip(f"no real node on this machine: {reason}")
    with NodeCluster(2) as cluster:
        cluster.add_node()
        yield cluster
        cluster.keep_logs = request.session.testsfailed > 0
        run = cluster.control_plane.run.path
        processes = descendants(cluster)
    left = traces_of(run, processes)
    assert not left, f"the cluster left behind: {', '.join(left)}"
