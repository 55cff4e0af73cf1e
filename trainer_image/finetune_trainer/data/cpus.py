"""Counts the CPUs that this process may use, by its CPU affinity and its cgroup limits, which a container's `cpu` limit sets."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def available_cpus(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP) -> int:
    """Number of CPUs, 1 or more. A limit of 1.5 CPUs counts as 2. Limits of cgroup v1 are ignored."""
    cpus = float(len(os.sched_getaffinity(0)))
    try:
        # `0::/path` names this process's group in cgroup v2. The limits of its parent groups also apply.
        (path,) = [line.removeprefix("0::") for line in own.read_text().splitlines() if line.startswith("0::")]
    except (OSError, ValueError):
        return max(int(cpus), 1)
    group = root / path.strip("/")
    for directory in (group, *group.parents):
        if directory.is_relative_to(root):
            cpus = min(cpus, _limit(directory / "cpu.max"))
    return max(-int(-cpus // 1), 1)


def _limit(path: Path) -> float:
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # the root group has no such file; "max" means no limit
        return float("inf")
