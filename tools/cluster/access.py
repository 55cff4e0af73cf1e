"""Access to any cluster through its kubeconfig."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from tools.cluster.processes import run_command


class ClusterAccess:
    """kubectl and helm, bound to one cluster and to a scratch directory for their caches."""

    def __init__(
        self, *, kubeconfig: Path, scratch: Path, kubectl: tuple[str, ...], helm: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
        self.kubeconfig = kubeconfig
        """Path of a kubeconfig with the rights of a cluster administrator."""
        self._kubectl = kubectl
        self._helm = helm
        self.environment: dict[str, str] = {
            **environment,
            "KUBECONFIG": str(kubeconfig),
            "KUBECACHEDIR": str(scratch / "kubectl"),
            "HELM_CACHE_HOME": str(scratch / "helm-cache"),
            "HELM_CONFIG_HOME": str(scratch / "helm-config"),
            "HELM_DATA_HOME": str(scratch / "helm-data"),
        }
        """Environment for a client of this cluster that a test starts itself."""

    @property
    def kubectl_command(self) -> str:
        """The kubectl command for a shell with `environment`."""
        return shlex.join(self._kubectl)

    @property
    def helm_command(self) -> str:
        """The helm command for a shell with `environment`."""
        return shlex.join(self._helm)

    def kubectl(self, *arguments: str | Path, input: str | None = None) -> str:  # noqa: A002 - as in subprocess.run
        """Run kubectl and return its standard output.

        Raises:
            ClusterError: kubectl failed; the message holds its output.
        """
        return run_command(*self._kubectl, *arguments, stdin=input, environment=self.environment)

    def helm(self, *arguments: str | Path, input: str | None = None) -> str:  # noqa: A002 - as in subprocess.run
        """Run helm and return its standard output.

        Raises:
            ClusterError: helm failed; the message holds its output.
        """
        return run_command(*self._helm, *arguments, stdin=input, environment=self.environment)
