"""README and the page on a first job lead from nothing to the first `Succeeded`, on a tainted node with new volumes.

The images come from a real registry.
What surrounds the reader is made here: a node, a registry, a storage class with volumes, and the programs `kubectl` and `helm`.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.documented import ROOT, Reader, blocks_of, cluster_programs, path_with
from tests.support.registry import Registry, running_registry
from tools.cluster import network
from tools.cluster.node_cluster import NodeCluster
from tools.cluster.requirements import unsupported_reason
from tools.volumes import storage_class, volume

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(5400)]
README = ROOT / "README.md"
PAGE = ROOT / "docs/tutorial/first-job-on-a-cluster.md"
NUM_VOLUMES = 4
"""Three claims of the reader's, and the job's workspace."""


@pytest.fixture
def cluster() -> Iterator[NodeCluster]:
    reason = unsupported_reason()
    if reason is not None:
        pytest.skip(f"no real node here: {reason}")
    with NodeCluster() as cluster:
        cluster.kubectl("taint", "node", cluster.node.place.name, "dedicated=training:NoSchedule")
        yield cluster


@pytest.fixture
def registry(cluster: NodeCluster, tmp_path: Path) -> Iterator[Registry]:
    with running_registry(tmp_path / "registry", network.BRIDGE_ADDRESS) as registry:
        cluster.node.pull_without_tls(registry.host)
        yield registry
        shutil.rmtree(registry.storage)  # six gigabytes, which pytest would keep


@pytest.fixture
def volumes(cluster: NodeCluster, tmp_path: Path) -> None:
    """As new ones are: root's, and nobody else may write."""
    # The pods' user has to get there; pytest's own directories are closed.
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    documents = [storage_class("shared", is_default=True)]
    for number in range(NUM_VOLUMES):
        directory = tmp_path / f"volume-{number}"
        directory.mkdir(mode=0o755)
        documents.append(volume("any", directory.name, directory, storage_class="shared"))
    cluster.kubectl("apply", "-f", "-", input="\n".join(map(json.dumps, documents)))


@pytest.fixture
def reader(cluster: NodeCluster, tmp_path: Path) -> Reader:
    """At the top of a checkout of their own, with the two programs on PATH."""
    on_path = path_with(tmp_path / "programs", cluster_programs(cluster))
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("build", "runs", ".git"):
            (checkout / path.name).symlink_to(path)
    # The registry of the test has no certificate.
    environment = {**cluster.environment, "PATH": on_path, "OPTIONS": "--plain-http"}
    return Reader(checkout, environment, patience_seconds=3000.0)


def test_readme_leads_from_nothing_to_a_verified_model(
    cluster: NodeCluster, registry: Registry, volumes: None, reader: Reader
) -> None:
    began = time.monotonic()
    with ExitStack() as stack:
        stack.callback(cluster.node.images.forget, registry.host)
        for block in [*blocks_of(README, section="Install on a cluster"), *blocks_of(PAGE)]:
            printed = reader.run(
                ROOT / block.page, block, {"registry.example": registry.host} if "registry.example" in block.text else {}
            )
            print(f"{time.monotonic() - began:.0f} s after the beginning:\n{printed}")
        table = printed.splitlines()
        row = dict(zip(*(line.split() for line in table if line.startswith(("NAME ", "quickstart-cluster "))), strict=True))
        assert row["PHASE"] == "Succeeded"
        pods = json.loads(cluster.kubectl("get", "pods", "--all-namespaces", "--output", "json"))["items"]
        images = {one["image"] for pod in pods for one in pod["spec"]["containers"]}
        assert all(image.startswith(f"{registry.host}/team/finetune-") and "@sha256:" in image for image in images), images
        assert len(images) == 2
    result = reader.checkout / "build" / "result"
    assert json.loads((result / "verification.json").read_text())["passed"] is True
    subprocess.run([sys.executable, "-m", "tools.plain_load", result / "merged"], cwd=ROOT, check=True, timeout=300)
