"""Checks what a real node needs on this machine: Debian packages, root, namespaces and cgroups."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.cluster.binaries import BuildError, find_binaries
from tools.cluster.cgroups import CGROUP_ROOT, are_writable
from tools.cluster.errors import ClusterError
from tools.cluster.network import foreign_route
from tools.cluster.processes import run_command

_PACKAGE_OF_PROGRAM = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "iptables": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "openssl": "openssl",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
}
"""Programs that nodes or builds of images need -> the Debian packages that contain them."""

_PLUGIN_PACKAGE = "containernetworking-plugins"
_PLUGIN_DIRECTORIES = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
_PLUGINS = ("bridge", "host-local", "loopback", "portmap")


def plugin_directory() -> Path | None:
    """Return the directory of the network plugins, or None if they are not installed."""
    for directory in _PLUGIN_DIRECTORIES:
        if all((directory / plugin).exists() for plugin in _PLUGINS):
            return directory
    return None


def missing_packages() -> list[str]:
    """Return the Debian packages whose programs are not installed, sorted."""
    missing = {package for program, package in _PACKAGE_OF_PROGRAM.items() if shutil.which(program) is None}
    if plugin_directory() is None:
        missing.add(_PLUGIN_PACKAGE)
    return sorted(missing)


def ensure_packages() -> None:
    """Install the Debian packages that are missing, if any.

    Raises:
        ClusterError: some are missing and cannot be installed: no root, no apt-get, or apt-get failed.
    """
    install_packages(missing_packages())


def install_packages(missing: list[str]) -> None:
    """Install these Debian packages, if any. Raises ClusterError as `ensure_packages` does."""
    if not missing:
        return
    if not _can_install():
        raise ClusterError(f"not installed: {', '.join(missing)}; as root: apt-get install {' '.join(missing)}")
    print(f"test cluster: installing {', '.join(missing)}", file=sys.stderr, flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run_command("apt-get", "update", environment=environment)
    run_command("apt-get", "install", "-y", "--no-install-recommends", *missing, environment=environment)


def unsupported_reason() -> str | None:
    """Return why this machine cannot run a real node, or None if it can.

    Changes nothing. Programs that `ensure_packages` and `ensure_binaries` can provide are not reported as missing.
    """
    if not sys.platform.startswith("linux"):
        return f"a node needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "a node needs root (network namespaces, mounts, cgroups): run the tests as root"
    missing = missing_packages()
    if missing and not _can_install():
        return f"not installed, and there is no apt-get to install them: {', '.join(missing)}"
    if not are_writable():
        return f"the cgroups in {CGROUP_ROOT} cannot be written: in a container, run it privileged"
    probe = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"namespaces cannot be made: {tried.stderr.strip()}"
    foreign = foreign_route()
    if foreign is not None:
        return f"the test cluster's addresses are in use on this machine: {foreign}"
    try:
        if find_binaries() is None and shutil.which("go") is None:
            return "the cluster's programs are not built, and there is no Go to build them with: install Go 1.26"
    except BuildError as error:
        return str(error)
    return None


def _can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None
