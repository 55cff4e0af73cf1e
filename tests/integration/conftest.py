"""One control plane per session with the chart installed; per test a namespace and operators that serve it alone."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.kube import Kube
from tests.integration.operator_process import ForkedOperator, OperatorProcess
from tests.integration.workload import Workload
from tests.support.existing_cluster import EXISTING_VARIABLE, ExistingCluster, existing_kubeconfig
from tests.support.installed_chart import CHART, RELEASE, SYSTEM, InstalledChart, install
from tools.cluster.access import ClusterAccess
from tools.cluster.control_plane import ControlPlane
from tools.cluster.errors import wait_until

__all__ = ["CHART", "RELEASE", "SYSTEM"]
_numbers = itertools.count()


@dataclass(frozen=True)
class Installed:
    """The chart on a control plane."""

    cluster: ClusterAccess
    kube: Kube
    operator_kubeconfig: Path
    """With the rights of the chart's ServiceAccount, no more."""
    chart: InstalledChart


OperatorFactory = Callable[..., OperatorProcess]


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


@pytest.fixture(scope="session")
def chart_values() -> tuple[str, ...]:
    """`name=value` of chart values that a suite sets."""
    return ()


@pytest.fixture(scope="session")
def installed(control_plane: ClusterAccess, chart_values: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """`helm install`, with default values but for `chart_values`. No node would run the Deployment: tests start the operator."""
    if control_plane.kubectl("get", "nodes", "--output", "name"):
        pytest.skip(f"these tests act as kubelets, so the cluster that {EXISTING_VARIABLE} names must have no nodes")
    chart = install(control_plane, tmp_path_factory.mktemp("operator"), *chart_values)
    return Installed(control_plane, chart.kube, chart.kubeconfig(), chart)


@pytest.fixture
def workload(installed: Installed) -> Iterator[Workload]:
    """A namespace of the test's own, with all claims that the default spec names."""
    name = f"team-{next(_numbers)}"
    kube = installed.kube
    kube.create("Namespace", "", {"metadata": {"name": name}})
    wait_until(lambda: kube.get("ServiceAccount", name, "default"), "the namespace's default ServiceAccount", 60)
    workload = Workload(kube, name)
    workload.make_claims()
    yield workload
    # A control plane of our own ends with all that it holds: to empty a namespace costs it as much as a test does.
    if not isinstance(installed.cluster, ControlPlane):
        kube.delete("Namespace", "", name)


@pytest.fixture
def operator(installed: Installed, workload: Workload, tmp_path: Path) -> Iterator[OperatorFactory]:
    """Starts operators for the test's namespace, or for all. One that is started again has the same identity, as a restarted
    container has, and so takes over at once the lease that it left when it was killed.
    """
    # No operator runs between two tests, so the holder of the lease has been killed.
    installed.kube.delete("Lease", SYSTEM, RELEASE)
    with ExitStack() as stack:

        def start(identity: str = "test", *, everywhere: bool = False) -> OperatorProcess:
            log = tmp_path / f"operator-{identity}.log"
            process = ForkedOperator(
                installed.operator_kubeconfig,
                log,
                *([] if everywhere else [f"--namespace={workload.namespace}"]),
                *(f"--identity={identity}", f"--lease-namespace={SYSTEM}", f"--lease-name={RELEASE}"),
            )
            return stack.enter_context(process)

        yield start
