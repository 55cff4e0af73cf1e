"""A control plane of a test's own with the chart installed and the operator's requests written down.

For what would disturb other tests: an empty cluster, or one with tens of thousands of objects. It ends with all that it holds.
"""

import json
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.integration.operator_process import OperatorProcess
from tests.support import installed_chart
from tests.support.installed_chart import RELEASE, SYSTEM
from tools.cluster.control_plane import ControlPlane
from tools.cluster.processes import Component


class AuditedPlane(ControlPlane):
    """Context manager: `kube` acts as administrator; `operator` gives operators with the chart's rights, to be entered."""

    chart_values: tuple[str, ...] = ()
    """`name=value` of values of the chart."""

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._install()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)

    def start(self, name: str, *arguments: str | Path) -> Component:
        """The API server gets its audit log."""
        if name == "kube-apiserver":
            self.audit_log = self.run.path / "audit.log"
            policy = self.run.path / "audit-policy.yaml"
            policy.write_text(json.dumps(_AUDIT_POLICY))
            arguments = (*arguments, f"--audit-policy-file={policy}", f"--audit-log-path={self.audit_log}")
        return super().start(name, *arguments)

    def operator(self, log: Path, identity: str = "test") -> OperatorProcess:
        """An operator for all namespaces."""
        lease = (f"--lease-namespace={SYSTEM}", f"--lease-name={RELEASE}", f"--identity={identity}")
        return OperatorProcess(self.operator_kubeconfig, log, *lease)

    def requests(self) -> Counter[str]:
        """The operator's requests so far, watches among them, as `get leases`."""
        found = Counter[str]()
        for line in self.audit_log.read_text().splitlines() if self.audit_log.exists() else ():
            entry = json.loads(line)
            found[f"{entry['verb']} {(entry.get('objectRef') or {}).get('resource') or entry['requestURI']}"] += 1
        return found

    def _install(self) -> None:
        chart = installed_chart.install(self, self.run.path, *self.chart_values)
        self.kube = chart.kube
        self.operator_kubeconfig = chart.kubeconfig()


_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    # A watch is reported when it begins, and every other request when it is answered.
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "users": [f"system:serviceaccount:{SYSTEM}:{RELEASE}"], "verbs": ["watch"],
         "omitStages": ["ResponseComplete"]},
        {"level": "Metadata", "users": [f"system:serviceaccount:{SYSTEM}:{RELEASE}"]},
        {"level": "None"},
    ],
}  # fmt: skip
