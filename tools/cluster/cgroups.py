"""The cgroups in which a node's kubelet creates those of its pods."""

import os
from contextlib import suppress
from pathlib import Path

from tools.cluster.errors import wait_until

CGROUP_ROOT = Path("/sys/fs/cgroup")

_PREFIX = "finetune-test-"

_CPU_SHARE = 4
"""CPU share of a node in multiples of one outside process: otherwise all of its pods together would get that of one compiler."""
_REMOVE_SECONDS = 60.0


def are_writable() -> bool:
    """Whether this process may make cgroups."""
    return bool(_hierarchies()) and all(os.access(directory, os.W_OK) for directory in _hierarchies())


def cgroup_of(node: str) -> str:
    """Name of a node's own top-level cgroup. A kubelet removes unknown pod cgroups, so it must not see those of other nodes."""
    return f"{_PREFIX}{node}"


def create_node_cgroups(node: str) -> None:
    """Create a node's cgroup in every hierarchy."""
    for hierarchy in _hierarchies():
        cgroup = hierarchy / cgroup_of(node)
        cgroup.mkdir(exist_ok=True)
        # Version 1: a new cpuset is empty, and a process in it would have no CPU to run on.
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / name).exists() and not _is_unified(hierarchy):
                (cgroup / name).write_text((hierarchy / name).read_text())
        if (cgroup / "cpu.shares").exists():
            (cgroup / "cpu.shares").write_text(str(_CPU_SHARE * 1024))
        if _is_unified(hierarchy):
            for directory in (hierarchy, cgroup):
                controllers = (directory / "cgroup.controllers").read_text().split()
                (directory / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
            if (cgroup / "cpu.weight").exists():
                (cgroup / "cpu.weight").write_text(str(_CPU_SHARE * 100))


def node_cgroups(node: str = "*") -> list[Path]:
    """Return the existing directories of a node's cgroup, or of all nodes' cgroups.

    On a machine with both versions of cgroups, runc also creates one in the version 2 hierarchy, wherever that is mounted.
    """
    candidates = (*CGROUP_ROOT.glob(cgroup_of(node)), *CGROUP_ROOT.glob(f"*/{cgroup_of(node)}"))
    return [path for path in candidates if path.is_dir()]


def processes_of_pod(uid: str) -> set[int]:
    """PIDs, on this machine, of a pod's processes on any node."""
    pids: set[int] = set()
    for cgroup in node_cgroups():
        for listed in cgroup.glob(f"**/pod{uid}/**/cgroup.procs"):
            with suppress(OSError):  # its container has just ended
                pids |= set(map(int, listed.read_text().split()))
    return pids


def remove_node_cgroups(node: str = "*") -> None:
    """Remove the cgroups of a node, or of all nodes, with their descendants. Their processes must have been killed.

    Raises:
        ClusterError: a process is still in one.
    """
    for cgroup in node_cgroups(node):

        def removed(cgroup: Path = cgroup) -> bool:
            for directory, _, _ in os.walk(cgroup, topdown=False):
                try:
                    Path(directory).rmdir()
                except OSError:
                    return False  # a killed process leaves its cgroup a moment later
            return not cgroup.exists()

        wait_until(removed, f"the processes in {cgroup} to end", _REMOVE_SECONDS)


def _is_unified(hierarchy: Path) -> bool:
    """Whether this is a version 2 hierarchy."""
    return (hierarchy / "cgroup.controllers").exists()


def _hierarchies() -> list[Path]:
    """The cgroup hierarchies that container runtimes use: the one of version 2, or one per version 1 controller."""
    if _is_unified(CGROUP_ROOT):
        return [CGROUP_ROOT]
    if not CGROUP_ROOT.is_dir():
        return []
    directories = [path for path in CGROUP_ROOT.iterdir() if path.is_dir() and not path.is_symlink()]
    return sorted(path for path in directories if not _is_unified(path))
