"""A control plane for the measurement: no Job controller and no scheduler, an audit log of the operator, an API server to
restart.

The Job controller, the scheduler and the garbage collector would take most of two cores and say nothing about the operator, so
the harness plays them (`playing`).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.support.audited_plane import AuditedPlane
from tools.cluster.errors import wait_until
from tools.cluster.processes import Component

CONTROLLERS = ("serviceaccount-controller", "namespace-controller", "root-ca-certificate-publisher-controller")
"""What a namespace needs before pods may be created in it."""
CLAIMS = ("models", "data", "results", "workspace")


class MeasuredPlane(AuditedPlane):
    """Context manager: a control plane with the chart installed."""

    def __init__(self) -> None:
        super().__init__()
        self._commands: dict[str, tuple[str | Path, ...]] = {}

    def start(self, name: str, *arguments: str | Path) -> Component:
        """Start a process with the flags of the measurement."""
        if name == "kube-apiserver":
            arguments = (
                *arguments,
                *("--audit-log-mode=batch", "--audit-log-batch-max-wait=1s"),
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
        next(one for one in self.components if one.name == "kube-scheduler").kill()
        super()._install()
