"""From the chart before to this one and back: jobs, definitions and profiles stay the objects that they are."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import CHART, RELEASE, SYSTEM, Installed
from tests.integration.kube import Kube
from tests.integration.workload import Workload
from tests.support.installed_chart import WAYS_OUT, InstalledChart
from tools.cluster.errors import ClusterError, wait_until

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
BEFORE, BEFORE_SYSTEM = "before", "before-system"
OBJECTS = ROOT / "tests" / "releases" / "chart-0.1.yaml"
DEFINITIONS = ("finetunejobs.finetune.dev", "finetuneprofiles.finetune.dev")
VALUES = "namespaces={before-team},profiles.default=null,profiles.before.maxActiveJobs=3"
ADDED_SINCE = ("allowedNamespaces", "limits", "network", "requireRehearsal")
"""Fields of a profile that the definition of then did not have."""


@pytest.fixture
def before(installed: Installed, tmp_path: Path) -> Iterator[Path]:
    """A chart that makes what 0.1 made; afterwards the session's release has its definitions back."""
    chart = tmp_path / "chart-0.1"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: finetune-operator\nversion: 0.1.0\nappVersion: 0.1.0\n")
    (chart / "templates" / "objects.yaml").write_text(OBJECTS.read_text())
    for path in (ROOT / "crds").glob("*.yaml"):
        definition = yaml.load(path.read_text(), yaml.CSafeLoader)
        spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        for name in ADDED_SINCE:
            spec.pop(name, None)
        (chart / "templates" / path.name).write_text(yaml.dump(definition, Dumper=yaml.CSafeDumper).replace("{{", '{{ "{{" }}'))
    yield chart
    installed.cluster.helm("uninstall", BEFORE, "--namespace", BEFORE_SYSTEM, "--ignore-not-found")
    for namespace in ("before-team", BEFORE_SYSTEM):
        installed.kube.delete("Namespace", "", namespace)
    installed.cluster.helm(
        *("upgrade", RELEASE, CHART, "--namespace", SYSTEM, "--reset-values", "--take-ownership"),
        *("--set", ",".join(("replicas=0", *WAYS_OUT))),
    )
    for namespace in ("before-team", BEFORE_SYSTEM):
        wait_until(lambda name=namespace: installed.kube.get("Namespace", "", name) is None, f"{namespace} to be gone", 60)


def uids(kube: Kube) -> dict[str, str]:
    """Of all that must outlive a change of the release."""
    kept: dict[str, tuple[str, str, str]] = {
        "job": ("FineTuneJob", "before-team", "tune"),
        "profile": ("FineTuneProfile", "", "before"),
        **{name: ("CustomResourceDefinition", "", name) for name in DEFINITIONS},
    }
    found = {}
    for what, (kind, namespace, name) in kept.items():
        document = kube.get(kind, namespace, name)
        assert document is not None, what
        assert "deletionTimestamp" not in document["metadata"], what
        found[what] = document["metadata"]["uid"]
    return found


def profile(kube: Kube) -> dict[str, Any]:
    found = kube.get("FineTuneProfile", "", "before")
    assert found is not None
    spec: dict[str, Any] = found["spec"]
    return spec


def test_from_the_chart_before_and_back(installed: Installed, before: Path, tmp_path: Path) -> None:
    kube, cluster = installed.kube, installed.cluster
    place = ("--namespace", BEFORE_SYSTEM)
    kube.create("Namespace", "", {"metadata": {"name": "before-team"}})
    cluster.helm("install", BEFORE, before, *place, "--create-namespace", "--take-ownership")
    Workload(kube, "before-team").apply()
    kept = uids(kube)
    assert "maxActiveJobs" not in profile(kube)

    cluster.helm("upgrade", BEFORE, CHART, *place, "--set", VALUES)
    name = "before-finetune-operator"
    token = cluster.kubectl("create", "token", name, *place).strip()
    release = InstalledChart(cluster, kube, token, tmp_path, name, BEFORE_SYSTEM)
    brought = release.bring_profiles()
    assert brought.returncode == 0, brought.stdout + brought.stderr
    assert uids(kube) == kept
    assert profile(kube)["maxActiveJobs"] == 3
    kube.patch("FineTuneProfile", "", "before", {"spec": {"limits": {"nodes": 2}}})
    assert profile(kube)["limits"] == {"nodes": 2}

    # Refused by its name, before anything is touched.
    deployment = kube.get("Deployment", BEFORE_SYSTEM, name)
    with pytest.raises(ClusterError, match="/logLevel"):
        cluster.helm("upgrade", BEFORE, CHART, *place, "--set", f"{VALUES},logLevel=loud")
    # Refused by the API server, midway: what was there works on.
    with pytest.raises(ClusterError, match="Not_A_Name"):
        cluster.helm(
            *("upgrade", BEFORE, CHART, *place, "--set", f"{VALUES},logLevel=debug,podLabels.changed=yes"),
            *("--set-json", 'extraObjects=[{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"Not_A_Name"}}]'),
        )
    assert "failed" in cluster.helm("history", BEFORE, *place)
    now = kube.get("Deployment", BEFORE_SYSTEM, name)
    assert deployment is not None
    assert now is not None
    assert now["spec"] == deployment["spec"]
    assert uids(kube) == kept
    assert release.bring_profiles().returncode == 0

    # Back, as docs/how-to/platform/install.md says.
    page = (ROOT / "docs" / "how-to" / "platform" / "install.md").read_text()
    found = re.search(r"kubectl patch finetuneprofile default (.*)\n", page)
    assert found is not None
    cluster.kubectl("patch", "finetuneprofile", "before", *found[1].replace("'", "").split())
    cluster.helm("rollback", BEFORE, "1", *place)
    assert uids(kube) == kept
    assert "limits" not in profile(kube)
    cluster.helm("upgrade", BEFORE, CHART, *place, "--set", VALUES)
    assert release.bring_profiles().returncode == 0
    assert uids(kube) == kept

    cluster.helm("uninstall", BEFORE, *place)
    wait_until(lambda: kube.get("FineTuneProfile", "", "before") is None, "the profile to go with its release", 60)
    job = kube.get("FineTuneJob", "before-team", "tune")
    assert job is not None
    assert (job["metadata"]["uid"], "deletionTimestamp" in job["metadata"]) == (kept["job"], False)
