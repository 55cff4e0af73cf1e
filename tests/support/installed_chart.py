"""The chart on a control plane without nodes: no Deployment runs there, so its programs are started as processes, with the
rights of its ServiceAccount.
"""

from __future__ import annotations

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
"""Of the release's objects that belong to the whole cluster."""
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
    """As administrator."""
    token: str
    directory: Path
    release: str
    """Name of the objects of the release in its namespace."""
    namespace: str

    def kubeconfig(self, server: str | None = None) -> Path:
        """With the operator's rights; at another address of the API server where one is given."""
        config = yaml.safe_load(self.cluster.kubeconfig.read_text())
        config["users"] = [{"name": config["users"][0]["name"], "user": {"token": self.token}}]
        if server is not None:
            config["clusters"][0]["cluster"] = {"server": server}
        path = self.directory / f"kubeconfig-{self.release}-{self.namespace}"
        path.write_text(json.dumps(config))
        return path

    def has_profiles(self) -> bool:
        """Whether the operator's pod begins by bringing profiles."""
        return "initContainers" in self._template()["spec"]

    def _template(self) -> dict[str, Any]:
        deployment = self.kube.get("Deployment", self.namespace, self.release)
        assert deployment is not None
        template: dict[str, Any] = deployment["spec"]["template"]
        return template

    def bring_profiles(self) -> subprocess.CompletedProcess[str]:
        """What the first container of the operator's pod does, and does again if rights and policies are not in effect yet."""
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
