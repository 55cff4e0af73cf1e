"""A cluster that is already there, named by KUBECONFIG_FOR_TESTS, in place of one that the tests start."""

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from tools.cluster.access import ClusterAccess
from tools.cluster.errors import ClusterError

EXISTING_VARIABLE = "KUBECONFIG_FOR_TESTS"
"""Environment variable with the kubeconfig of a cluster to test on."""


def existing_kubeconfig() -> Path | None:
    """Return the kubeconfig that the environment names, or None when the tests start their own cluster.

    Raises:
        ClusterError: the variable names no file.
    """
    named = os.environ.get(EXISTING_VARIABLE)
    if not named:
        return None
    path = Path(named).absolute()
    if not path.is_file():
        raise ClusterError(f"{EXISTING_VARIABLE}={named} is no file: name a kubeconfig, or unset it")
    return path


class ExistingCluster(ClusterAccess):
    """Context manager for a running cluster: it starts nothing and leaves the cluster running."""

    def __init__(self, kubeconfig: Path) -> None:
        absent = [program for program in ("kubectl", "helm") if shutil.which(program) is None]
        if absent:
            raise ClusterError(f"testing on {kubeconfig} needs {' and '.join(absent)} on PATH: install it")
        self._scratch = tempfile.TemporaryDirectory(prefix="finetune-clients-")
        super().__init__(
            kubeconfig=kubeconfig, scratch=Path(self._scratch.name), kubectl=("kubectl",), helm=("helm",), environment=os.environ
        )

    def __enter__(self) -> "ExistingCluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._scratch.cleanup()
