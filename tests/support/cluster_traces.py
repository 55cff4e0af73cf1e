"""What a cluster leaves on this machine: the tests demand that it is nothing."""

from pathlib import Path

import psutil

from tools.cluster import network
from tools.cluster.cgroups import node_cgroups
from tools.cluster.control_plane import ControlPlane
from tools.cluster.node_cluster import NodeCluster


def descendants(cluster: ControlPlane | NodeCluster) -> list[psutil.Process]:
    """Return all processes of a cluster, containers included."""
    plane = cluster.control_plane if isinstance(cluster, NodeCluster) else cluster
    roots = [psutil.Process(component.process.pid) for component in plane.components]
    return roots + [child for root in roots for child in root.children(recursive=True)]


def traces_of(run: Path, processes: list[psutil.Process]) -> list[str]:
    """Return what is left on this machine of a cluster that has ended.

    Args:
        run: its run directory.
        processes: its processes, from before its end.
    """
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return [
        *(f"process {process.pid}" for process in processes if process.is_running()),
        *(f"mount {line}" for line in mounts if str(run) in line),
        *(f"directory {run}" for _ in [run] if run.exists()),
        *(f"cgroup {path}" for path in node_cgroups()),
        *network.traces(),
    ]
