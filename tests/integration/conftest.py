"""One control plane per session with the chart installed; per test a namespace and operators that serve it alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.integration.kube import Kube
from tests.integration.operator_process import OperatorProcess
from tests.integration.workload import Workload
from tests.support.cluster.access import ClusterAccess
from tests.support.cluster.errors import wait_until
from tests.support.cluster.existing import EXISTING_VARIABLE
from tests.support.cluster.fixtures import control_plane

__all__ = ["control_plane"]
CHART = Path(__file__).parents[2] / "charts" / "finetune-operator"
SYSTEM = "finetune-system"
RELEASE = "finetune-operator"
_numbers = itertools.count()


@dataclass(frozen=True)
class Installed:
    """The chart on a control plane."""

    cluster: ClusterAccess
    kube: Kube
    operator_kubeconfig: Path
    """With the rights of the chart's ServiceAccount, no more."""


OperatorFactory = Callable[..., OperatorProcess]


@pytest.fixture(scope="session")
def chart_values() -> tuple[str, ...]:
    """`name=value` of chart values that a suite sets."""
    return ()


@pytest.fixture(scope="session")
def installed(control_plane: ClusterAccess, chart_values: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """`helm install`, with default values but for `chart_values`. No node would run the Deployment: tests start the operator."""
    if control_plane.kubectl("get", "nodes", "--output", "name"):
        pytest.skip(f"these tests act as kubelets, so the cluster that {EXISTING_VARIABLE} names must have no nodes")
    # `--wait` has helm wait until the definitions are served; the default profile, a hook, comes after.
    control_plane.helm(
        *("upgrade", "--install", RELEASE, CHART, "--namespace", SYSTEM, "--create-namespace"),
        *("--set", ",".join(("replicas=0", *chart_values)), "--wait", "--timeout", "3m"),
    )
    kube = Kube(control_plane.kubeconfig)
    wait_until(lambda: kube.get("ServiceAccount", SYSTEM, RELEASE), "the chart's ServiceAccount", 60)
    token = control_plane.kubectl("create", "token", RELEASE, "--namespace", SYSTEM, "--duration", "2h").strip()
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    kubeconfig = tmp_path_factory.mktemp("operator") / "kubeconfig"
    kubeconfig.write_text(json.dumps(config))
    return Installed(control_plane, kube, kubeconfig)


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
            process = OperatorProcess(
                installed.operator_kubeconfig,
                log,
                *([] if everywhere else [f"--namespace={workload.namespace}"]),
                *(f"--identity={identity}", f"--lease-namespace={SYSTEM}", f"--lease-name={RELEASE}"),
            )
            return stack.enter_context(process)

        yield start
