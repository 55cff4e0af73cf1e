"""A control plane for the measurement: no Job controller and no scheduler, an audit log of the operator, an API server to restart.

The Job controller, the scheduler and the garbage collector would take most of two cores and say nothing about the operator, so
the harness plays them (`playing`).
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import TracebackType

import yaml

from tests.integration.conftest import CHART, RELEASE, SYSTEM
from tests.integration.kube import Kube
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.errors import wait_until
from tests.support.cluster.processes import Component

CONTROLLERS = ("serviceaccount-controller", "namespace-controller", "root-ca-certificate-publisher-controller")
"""What a namespace needs before pods may be created in it."""
CLAIMS = ("models", "data", "results", "workspace")


class MeasuredPlane(ControlPlane):
    """Context manager: a control plane with the chart installed."""

    def __enter__(self) -> MeasuredPlane:
        self._commands: dict[str, tuple[str | Path, ...]] = {}
        super().__enter__()
        try:
            next(one for one in self.components if one.name == "kube-scheduler").kill()
            self._install()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)

    def start(self, name: str, *arguments: str | Path) -> Component:
        """Start a process with the flags of the measurement."""
        if name == "kube-apiserver":
            self.audit_log = self.run.path / "audit.log"
            policy = self.run.path / "audit-policy.yaml"
            policy.write_text(json.dumps(_audit_policy()))
            arguments = (
                *arguments,
                *(f"--audit-policy-file={policy}", f"--audit-log-path={self.audit_log}", "--audit-log-mode=batch"),
                "--audit-log-batch-max-wait=1s",
                "--profiling=true",
                # So much may be said in one go that the harness itself is never told to wait.
                *("--max-requests-inflight=1000", "--max-mutating-requests-inflight=500"),
            )
        elif name == "kube-controller-manager":
            arguments = (*arguments, f"--controllers={','.join(CONTROLLERS)}")
        self._commands[name] = arguments
        return super().start(name, *arguments)

    @property
    def api_server(self) -> Component:
        """The API server that runs now."""
        return [one for one in self.components if one.name == "kube-apiserver"][-1]

    def bounce_api_server(self) -> float:
        """Kill the API server and start it again. Returns the seconds until it is ready."""
        begun = time.monotonic()
        os.killpg(self.api_server.process.pid, signal.SIGKILL)
        self.api_server.process.wait(30)
        self.components.append(super().start("kube-apiserver", *self._commands["kube-apiserver"]))
        wait_until(lambda: self.api.read("/readyz") is not None, "the API server to be ready again", 180)
        return time.monotonic() - begun

    def make_namespace(self, name: str) -> None:
        """A namespace with the claims that every job names."""
        self.kube.create("Namespace", "", {"metadata": {"name": name}})
        wait_until(lambda: self.kube.get("ServiceAccount", name, "default"), "the namespace's default ServiceAccount", 60)
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        for claim in CLAIMS:
            self.kube.create("PersistentVolumeClaim", name, {"metadata": {"name": claim}, "spec": spec})

    def _install(self) -> None:
        self.helm(
            *("upgrade", "--install", RELEASE, CHART, "--namespace", SYSTEM, "--create-namespace"),
            *("--set", "replicas=0", "--timeout", "3m"),
        )
        self.kube = Kube(self.kubeconfig)
        wait_until(lambda: self.kube.get("ServiceAccount", SYSTEM, RELEASE), "the chart's ServiceAccount", 60)
        wait_until(lambda: self.kube.get("FineTuneProfile", "", "default"), "the default profile", 60)
        token = self.kubectl("create", "token", RELEASE, "--namespace", SYSTEM, "--duration", "4h").strip()
        config = yaml.safe_load(self.kubeconfig.read_text())
        config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
        self.operator_kubeconfig = self.run.path / "operator-kubeconfig"
        self.operator_kubeconfig.write_text(json.dumps(config))


def _audit_policy() -> dict[str, object]:
    user = f"system:serviceaccount:{SYSTEM}:{RELEASE}"
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata", "users": [user]}, {"level": "None"}],
    }
