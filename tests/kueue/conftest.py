"""A control plane with the chart and a real Kueue, and a queue for each test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Installed, installed, operator, workload
from tests.integration.workload import Workload
from tests.kueue.queues import Queues
from tests.kueue.real_kueue import start_kueue
from tools.cluster.control_plane import ControlPlane

__all__ = ["installed", "operator", "workload"]
MANAGER, MANIFESTS = "KUEUE", "KUEUE_MANIFESTS"


def given_kueue() -> tuple[Path, Path]:
    """Manager and manifests of the Kueue to test with; skips if there is none."""
    manager, manifests = os.environ.get(MANAGER, ""), os.environ.get(MANIFESTS, "")
    if not manager or not manifests:
        pytest.skip(f"no real Kueue is given: set {MANAGER} to its manager and {MANIFESTS} to config/components of its source")
    return Path(manager).resolve(strict=True), Path(manifests).resolve(strict=True)


@pytest.fixture(scope="session")
def control_plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """A control plane of its own with Kueue next to it."""
    kueue = given_kueue()
    with ControlPlane() as plane:
        start_kueue(plane, *kueue)
        yield plane
        plane.keep_logs = request.session.testsfailed > 0


@pytest.fixture(scope="session")
def chart_values() -> tuple[str, ...]:
    """What the operator needs to tell Kueue more than the queue."""
    return ("kueue.patchJobs=true", "kueue.readQueues=true")


@pytest.fixture
def queues(installed: Installed, workload: Workload) -> Iterator[Queues]:
    """Queues of the test's namespace."""
    found = Queues(installed.kube, workload)
    yield found
    found.remove()
