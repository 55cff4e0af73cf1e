"""`python -m tools.cluster`: run a disposable cluster until Ctrl-C or SIGTERM."""

import argparse
import signal
import sys
from types import FrameType
from typing import NoReturn

from tools.cluster.binaries import BuildError
from tools.cluster.control_plane import ControlPlane
from tools.cluster.errors import ClusterError
from tools.cluster.node_cluster import NodeCluster
from tools.cluster.requirements import unsupported_reason

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Start the cluster, print its kubeconfig, and remove it on Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tools.cluster", description=__doc__)
    parser.add_argument(
        "--control-plane-only", action="store_true", help="start no node: pods are created but stay pending; needs no root"
    )
    parser.add_argument("--nodes", type=int, default=1, help="number of real nodes")
    arguments = parser.parse_args()
    only_control_plane: bool = arguments.control_plane_only
    nodes: int = arguments.nodes

    for number in _STOP_SIGNALS:
        signal.signal(number, _abort_start)
    if not only_control_plane:
        reason = unsupported_reason()
        if reason is not None:
            sys.exit(f"test cluster: {reason}; --control-plane-only does not need this")
    try:
        with ControlPlane() if only_control_plane else NodeCluster(nodes) as cluster:
            if isinstance(cluster, NodeCluster):
                for _ in range(nodes - 1):
                    cluster.add_node()
            print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
            print("test cluster: ready, Ctrl-C removes it", file=sys.stderr, flush=True)
            # From here on a signal ends the cluster in order, and a second signal cannot interrupt its removal.
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
            signal.sigwait(_STOP_SIGNALS)
    except (BuildError, ClusterError) as error:
        sys.exit(f"test cluster: {error}")


def _abort_start(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(f"test cluster: start-up ended by {signal.Signals(number).name}")


if __name__ == "__main__":
    main()
