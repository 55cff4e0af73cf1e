"""The chart on a control plane without nodes: no Deployment runs there, so its programs are started as processes, with the
rights of its ServiceAccount.
"""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.integration.kube import Kube
from tests.support.forked_program import run_forked
from tools.cluster.access import ClusterAccess
from tools.cluster.errors import wait_until

CHART = Path(__file__).parents[2] / "charts" / "finetune-operator"
SYSTEM = "finetune-system"
RELEASE = "finetune-operator"
CLUSTER_NAME = f"{RELEASE}-{SYSTEM}"
"""Name of the release's objects that belong to the whole cluster."""
WAYS_OUT = (
    "profiles.default.fetch.allowedSources={hf://,s3://}",
    "profiles.default.publish.allowedDestinations={hf://,s3://,oci://}",
    "admission.operator.images={registry.test}",
)
"""Opened for the jobs of tests: by default the chart lets nothing out, and the operator starts only the chart's own images."""
PROFILES_ANNOTATION = "finetune.dev/profiles"
_IN_EFFECT_SECONDS = 30.0
"""After which the API server has certainly taken changed roles and policies into account."""


@dataclass(frozen=True)
class InstalledChart:
    """A release, and access with the operator's rights."""

    cluster: ClusterAccess
    kube: Kube
    """Client with the rights of an administrator."""
    token: str
    directory: Path
    release: str
    """Name of the objects of the release in its namespace."""
    namespace: str

    def kubeconfig(self, server: str | None = None) -> Path:
        """Write a kubeconfig with the operator's rights, for another address of the API server where one is given."""
        return with_token(self.cluster, self.token, self.directory / f"kubeconfig-{self.release}-{self.namespace}", server)

    def has_profiles(self) -> bool:
        """Whether the operator's pod begins by bringing profiles."""
        return "initContainers" in self._template()["spec"]

    def _template(self) -> dict[str, Any]:
        deployment = self.kube.get("Deployment", self.namespace, self.release)
        assert deployment is not None
        template: dict[str, Any] = deployment["spec"]["template"]
        return template

    def bring_profiles(self) -> subprocess.CompletedProcess[str]:
        """Do what the first container of the operator's pod does, again if rights and policies are not in effect yet."""
        template = self._template()
        (container,) = template["spec"]["initContainers"]
        program = container["command"][container["command"].index("-m") + 1]
        file = self.directory / "profiles.json"
        file.write_text(template["metadata"]["annotations"][PROFILES_ANNOTATION])
        deadline = time.monotonic() + _IN_EFFECT_SECONDS
        while True:
            done = run_forked(program, file, KUBECONFIG=str(self.kubeconfig()))
            if done.returncode == 0 or "forbidden" not in done.stdout or time.monotonic() > deadline:
                return done
            time.sleep(0.5)


def with_token(cluster: ClusterAccess, token: str, path: Path, server: str | None = None) -> Path:
    """Write a kubeconfig whose user has this token."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    if server is not None:
        config["clusters"][0]["cluster"] = {"server": server}
    path.write_text(json.dumps(config))
    return path


def as_account(cluster: ClusterAccess, account: str, namespace: str, directory: Path) -> Path:
    """Write a kubeconfig with the rights of a ServiceAccount."""
    token = cluster.kubectl("create", "token", account, "--namespace", namespace, "--duration", "2h").strip()
    return with_token(cluster, token, directory / f"kubeconfig-{account}-{namespace}")


def install(
    cluster: ClusterAccess,
    directory: Path,
    *settings: str,
    release: str = RELEASE,
    namespace: str = SYSTEM,
    arguments: tuple[str, ...] = (),
) -> InstalledChart:
    """`helm upgrade --install` with `name=value` settings, and its profiles. Raises if they do not come."""
    opened = tuple(one for one in WAYS_OUT if "profiles.default=null" not in settings or "profiles.default" not in one)
    cluster.helm(
        *("upgrade", "--install", release, CHART, "--namespace", namespace, "--create-namespace"),
        *("--set", ",".join(("replicas=0", *opened, *settings)), *arguments),
    )
    kube = Kube(cluster.kubeconfig)
    name = next((one.partition("=")[2] for one in settings if one.startswith("fullnameOverride=")), release)
    wait_until(lambda: kube.get("ServiceAccount", namespace, name), "the chart's ServiceAccount", 60)
    token = cluster.kubectl("create", "token", name, "--namespace", namespace, "--duration", "6h").strip()
    installed = InstalledChart(cluster, kube, token, directory, name, namespace)
    if installed.has_profiles():
        brought = installed.bring_profiles()
        assert brought.returncode == 0, brought.stdout + brought.stderr
    return installed
