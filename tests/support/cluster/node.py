"""A real node: kubelet, containerd, runc and kube-proxy in namespaces of their own.

The node's first process only holds the namespaces and reaps; when it is killed, the kernel kills every process of
the node, containers included, and its mounts vanish. The node sees this machine's files, so a hostPath volume that a
test prepares is readable and writable from its pods.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from types import TracebackType

from tests.support.cluster import network
from tests.support.cluster.cache import cache_root
from tests.support.cluster.cgroups import NODE_CGROUP, create_node_cgroups, remove_node_cgroups
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.errors import ClusterError
from tests.support.cluster.images import ImageStore, probe_image_name, write_program_image
from tests.support.cluster.node_config import containerd_config, kubelet_config, network_plugins_config
from tests.support.cluster.processes import Component, run_command
from tests.support.cluster.requirements import plugin_directory

NODE_NAME = "node-1"
_SUBJECT = f"/O=system:nodes/CN=system:node:{NODE_NAME}"

_END_SECONDS = 60.0
_KUBE_PROXY_HEALTH_PORT = 10256

_PRIVATE_DIRECTORIES = (
    "etc/cni/net.d",
    "run/containerd",
    "run/netns",
    "var/lib/cni",
    "var/lib/containerd",
    "var/lib/kubelet",
    "var/log/containers",
    "var/log/pods",
)
"""Directories of this machine that the node's programs use by default, hidden in the node by empty ones."""


def node_root() -> Path:
    """Return the directory that keeps the node's images between runs. Deleting it costs only a new import."""
    return cache_root() / "node-root"


class Node:
    """Context manager for the one node of a control plane that listens on the bridge (see `network`)."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._control_plane = control_plane
        self._directory = control_plane.run.path / "node"
        self._private = self._directory / "root"
        self._made: list[Path] = []
        self._holder: Component | None = None
        self.images = ImageStore(self._private / "run/containerd/containerd.sock")

    def __enter__(self) -> "Node":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def first_process(self) -> int:
        """Return the PID, on this machine, of the node's process 1. Killing it is a power cut."""
        if self._holder is None:
            raise ClusterError("the node is not running: use it as a context manager")
        pid = self._holder.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        return int(children.read_text().split()[0])

    def command(self, *arguments: str | Path) -> list[str | Path]:
        """Return the command line that runs `arguments` inside the node. The working directory there is /."""
        return ["nsenter", "--target", str(self.first_process()), "--all", *arguments]

    def _start(self) -> None:
        remove_node_cgroups()  # of a killed run
        self._directory.mkdir()
        create_node_cgroups()
        self._hold_namespaces()
        self._hide_directories()
        configs = self._write_configs()

        if self._has_containers():
            # The kubelet would take a minute to clear away what an earlier run's pods left, so the runtime's own
            # list is emptied while the part that would read it is off.
            sweep = self._start_containerd(configs / "containerd-sweep.toml", "containerd-sweep")
            self.images.remove_containers()
            self._end_in_node(sweep)
        self._start_containerd(configs / "containerd.toml", "containerd")
        self._load_sandbox_image()
        self._start_kubelet(configs / "kubelet.json")
        self._start_kube_proxy()
        self._control_plane.wait_until(self._is_ready, "the node to be Ready")

    def _hold_namespaces(self) -> None:
        probe = self._control_plane.binaries.probe
        self._holder = self._control_plane.start(
            "node",
            *("nsenter", f"--net=/run/netns/{network.NODE_NAMESPACE}"),
            *("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"),
            *(probe, "pause"),
        )

        def is_settled() -> bool:
            try:
                return Path(f"/proc/{self.first_process()}/exe").readlink() == probe.resolve()
            except (OSError, IndexError):
                return False  # unshare has not got so far

        self._control_plane.wait_until(is_settled, "the node's namespaces")
        run_command(*self.command("hostname", NODE_NAME))

    def _hide_directories(self) -> None:
        persistent = node_root() / "containerd"
        # Shared, so that a volume that the kubelet mounts is seen by the containers that containerd starts.
        run_command(*self.command("mount", "--make-rshared", "/"))
        for name in _PRIVATE_DIRECTORIES:
            target = Path("/", name)
            source = persistent if name == "var/lib/containerd" else self._private / name
            source.mkdir(parents=True, exist_ok=True)
            self._make_mount_point(target)
            run_command(*self.command("mount", "--bind", source, target))
        run_command(*self.command("mount", "--make-rshared", "/"))

    def _make_mount_point(self, target: Path) -> None:
        missing = [one for one in (target, *target.parents) if not one.exists()]
        for directory in reversed(missing):
            directory.mkdir()
            self._made.append(directory)

    def _write_configs(self) -> Path:
        plugins = plugin_directory()
        if plugins is None:
            raise ClusterError("the network plugins are not installed: apt-get install containernetworking-plugins")
        authority = self._control_plane.authority
        hosts = [f"DNS:{NODE_NAME}", f"IP:{network.NODE_ADDRESS}"]
        serving = authority.sign(f"{NODE_NAME}-serving", _SUBJECT, "serverAuth", hosts)

        configs = self._directory / "config"
        configs.mkdir()
        (configs / "resolv.conf").write_text(f"nameserver {network.BRIDGE_ADDRESS}\n")
        sandbox = probe_image_name(self._control_plane.binaries.probe)
        for name, with_kubelet in (("containerd", True), ("containerd-sweep", False)):
            text = containerd_config(sandbox_image=sandbox, plugins=plugins, for_kubelet=with_kubelet)
            (configs / f"{name}.toml").write_text(text)
        kubelet = kubelet_config(
            cgroup=NODE_CGROUP, authority=authority.certificate, serving=serving, resolver=configs / "resolv.conf"
        )
        (configs / "kubelet.json").write_text(json.dumps(kubelet, indent=2))
        network_config = self._private / "etc/cni/net.d/10-bridge.conflist"
        network_config.write_text(json.dumps(network_plugins_config(network.POD_RANGE), indent=2))
        return configs

    def _has_containers(self) -> bool:
        kept = node_root() / "containerd/io.containerd.grpc.v1.cri"
        return any(any((kept / kind).glob("*")) for kind in ("containers", "sandboxes"))

    def _start_containerd(self, config: Path, name: str) -> Component:
        component = self._control_plane.start(name, *self.command("containerd", "--config", config))
        self._control_plane.wait_until(self._containerd_answers, f"{name} to answer")
        return component

    def _containerd_answers(self) -> bool:
        try:
            self.images.names()
        except ClusterError:
            return False
        return True

    def _end_in_node(self, component: Component) -> None:
        """End a process that `command` started: nsenter waits for it outside and passes no signal on."""
        pid = component.process.pid
        inside = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        run_command("kill", *inside)
        component.process.wait(_END_SECONDS)
        self._control_plane.components.remove(component)

    def _load_sandbox_image(self) -> None:
        probe = self._control_plane.binaries.probe
        name = probe_image_name(probe)
        if name not in self.images.names():
            archive = self._directory / "probe.tar"
            write_program_image(archive, probe, ["pause"])
            self.images.load(archive, name)

    def _start_kubelet(self, config: Path) -> None:
        authority = self._control_plane.authority
        identity = authority.sign(NODE_NAME, _SUBJECT, "clientAuth")
        kubeconfig = authority.kubeconfig(NODE_NAME, self._control_plane.server, identity)
        self._control_plane.start(
            "kubelet",
            *self.command(self._control_plane.binaries.kube, "kubelet"),
            *(f"--config={config}", f"--kubeconfig={kubeconfig}"),
            *(f"--hostname-override={NODE_NAME}", f"--node-ip={network.NODE_ADDRESS}"),
        )

    def _start_kube_proxy(self) -> None:
        authority = self._control_plane.authority
        identity = authority.sign("kube-proxy", "/CN=system:kube-proxy", "clientAuth")
        kubeconfig = authority.kubeconfig("kube-proxy", self._control_plane.server, identity)
        self._control_plane.start(
            "kube-proxy",
            *self.command(self._control_plane.binaries.kube, "kube-proxy"),
            *(f"--kubeconfig={kubeconfig}", f"--hostname-override={NODE_NAME}", "--proxy-mode=nftables"),
            *(f"--bind-address={network.NODE_ADDRESS}", f"--cluster-cidr={network.POD_RANGE}"),
            f"--healthz-bind-address={network.NODE_ADDRESS}:{_KUBE_PROXY_HEALTH_PORT}",
            # These settings belong to the whole machine and cannot be written from a network namespace: leave them.
            *("--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"),
            "--conntrack-tcp-timeout-close-wait=0",
        )

    def _is_ready(self) -> bool:
        node = self._control_plane.api.read_object(f"/api/v1/nodes/{NODE_NAME}")
        if node is None:
            return False
        conditions = {one["type"]: one["status"] for one in node["status"].get("conditions", [])}
        return conditions.get("Ready") == "True" and network.answers(network.NODE_ADDRESS, _KUBE_PROXY_HEALTH_PORT, "/healthz")

    def _stop(self) -> None:
        if self._holder is not None and self._holder.process.poll() is None:
            # unshare ends with its child, and the kernel lets process 1 go only after all others of its namespace.
            try:
                os.kill(self.first_process(), signal.SIGKILL)
            except (OSError, IndexError):
                self._holder.kill()  # it had not got as far as the node's process 1
            self._holder.process.wait(_END_SECONDS)
        remove_node_cgroups()
        shutil.rmtree(self._directory, ignore_errors=True)
        for directory in reversed(self._made):
            if not any(directory.iterdir()):
                directory.rmdir()
