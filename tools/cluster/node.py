"""A real node: kubelet, containerd, runc and kube-proxy in their own namespaces.

The node's first process only holds the namespaces and reaps orphans. When it is killed, the kernel kills every process
of the node, containers included, and its mounts vanish. Nodes see this machine's files, so pods on all nodes can read
and write a hostPath volume that a test prepares.
"""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from tools.cluster import network
from tools.cluster.cache import cache_root
from tools.cluster.cgroups import cgroup_of, create_node_cgroups, remove_node_cgroups
from tools.cluster.control_plane import ControlPlane
from tools.cluster.errors import ClusterError
from tools.cluster.images import ImageStore, probe_image_name, write_program_image
from tools.cluster.network import NodeNetwork
from tools.cluster.node_config import containerd_config, kubelet_config, network_plugins_config, plain_http_registry
from tools.cluster.processes import Component, run_command
from tools.cluster.requirements import plugin_directory

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
"""Directories that the node's programs use by default; in the node, empty directories hide those of this machine."""
_CONTENT = "io.containerd.content.v1.content/blobs"
_SNAPSHOTS = "io.containerd.snapshotter.v1.overlayfs"
_DATABASES = ("io.containerd.metadata.v1.bolt/meta.db", f"{_SNAPSHOTS}/metadata.db")


class Node:
    """Context manager for a node of a control plane that listens on the bridge (see `network`).

    A further node starts with the images of `first`, which must run no pod meanwhile.
    """

    def __init__(self, control_plane: ControlPlane, place: NodeNetwork, first: "Node | None" = None) -> None:
        self.place = place
        self._control_plane = control_plane
        self._first = first
        self._directory = control_plane.run.path / place.name
        self._private = self._directory / "root"
        # The first node's directory is kept between runs; deleting it costs only a new import.
        name = "node-root" if place.number == 1 else f"node-root-{place.number}"
        self._images = cache_root() / name / "containerd"
        self._made: list[Path] = []
        self._holder: Component | None = None
        self._components: list[Component] = []
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
        """Return the PID, on this machine, of the node's process 1. Killing it has the effect of a power cut."""
        if self._holder is None:
            raise ClusterError("the node is not running: use it as a context manager")
        pid = self._holder.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        return int(children.read_text().split()[0])

    def command(self, *arguments: str | Path) -> list[str | Path]:
        """Return the command line that runs `arguments` inside the node. The working directory there is /."""
        return ["nsenter", "--target", str(self.first_process()), "--all", *arguments]

    def cut_power(self) -> None:
        """Kill every process of the node at once, containers included; its disk stays as it is."""
        os.kill(self.first_process(), signal.SIGKILL)
        for component in self._components:
            component.process.wait(_END_SECONDS)
            self._control_plane.components.remove(component)
        self._components.clear()

    def restore_power(self) -> None:
        """Start the node again with its old disk, and wait until it is Ready."""
        for lost in ("run/containerd", "run/netns"):
            shutil.rmtree(self._private / lost)
        remove_node_cgroups(self.place.name)
        create_node_cgroups(self.place.name)
        self._hold_namespaces()
        self._hide_directories()
        self._start_programs()

    def _start(self) -> None:
        remove_node_cgroups(self.place.name)  # a killed run may have left some
        self._directory.mkdir()
        create_node_cgroups(self.place.name)
        if self._first is not None:
            with self._first.frozen_images() as images:
                link_images(images, self._images)
        self._hold_namespaces()
        self._hide_directories()
        self._write_configs()
        if self._first is not None or self._has_containers():
            # The kubelet would take a minute to remove the containers of an earlier run, so they are removed from the
            # runtime's store while the plugin for the kubelet is off.
            sweep = self._start_containerd("containerd-sweep")
            self.images.remove_containers()
            run_command("kill", *map(str, self._inside(sweep)))
            sweep.process.wait(_END_SECONDS)
            self._components.remove(sweep)
            self._control_plane.components.remove(sweep)
        self._start_programs()

    def _start_programs(self) -> None:
        self._containerd = self._start_containerd("containerd")
        self._load_sandbox_image()
        self._start_kubelet()
        self._start_kube_proxy()
        self._control_plane.wait_until(self._is_ready, f"{self.place.name} to be Ready")

    @contextmanager
    def frozen_images(self) -> Iterator[Path]:
        """Give the directory of the container runtime's files while the runtime is paused."""
        (process,) = self._inside(self._containerd)
        os.kill(process, signal.SIGSTOP)
        try:
            yield self._images
        finally:
            # nsenter stops together with its child, and would then not notice the child's end.
            os.kill(self._containerd.process.pid, signal.SIGCONT)
            os.kill(process, signal.SIGCONT)

    def _run(self, name: str, *arguments: str | Path) -> Component:
        """Start a program of the node on this machine."""
        component = self._control_plane.start(f"{self.place.name}-{name}", *arguments)
        self._components.append(component)
        return component

    def _hold_namespaces(self) -> None:
        probe = self._control_plane.binaries.probe
        self._holder = self._run(
            "namespaces",
            *("nsenter", f"--net=/run/netns/{self.place.namespace}"),
            *("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"),
            *(probe, "pause"),
        )

        def is_settled() -> bool:
            try:
                return Path(f"/proc/{self.first_process()}/exe").readlink() == probe.resolve()
            except (OSError, IndexError):
                return False  # unshare has not started it yet

        self._control_plane.wait_until(is_settled, f"the namespaces of {self.place.name}")
        run_command(*self.command("hostname", self.place.name))

    def _hide_directories(self) -> None:
        # Mounts are shared, so that containers see the volumes that the kubelet mounts.
        run_command(*self.command("mount", "--make-rshared", "/"))
        for name in _PRIVATE_DIRECTORIES:
            target = Path("/", name)
            source = self._images if name == "var/lib/containerd" else self._private / name
            source.mkdir(parents=True, exist_ok=True)
            self._make_mount_point(target)
            run_command(*self.command("mount", "--bind", source, target))
        run_command(*self.command("mount", "--make-rshared", "/"))

    def _make_mount_point(self, target: Path) -> None:
        missing = [directory for directory in (target, *target.parents) if not directory.exists()]
        for directory in reversed(missing):
            directory.mkdir()
            self._made.append(directory)

    def _write_configs(self) -> None:
        plugins = plugin_directory()
        if plugins is None:
            raise ClusterError("the network plugins are not installed: apt-get install containernetworking-plugins")
        authority = self._control_plane.authority
        hosts = [f"DNS:{self.place.name}", f"IP:{self.place.address}"]
        serving = authority.sign(f"{self.place.name}-serving", self._subject, "serverAuth", hosts)

        self._configs.mkdir()
        (self._configs / "resolv.conf").write_text(f"nameserver {network.BRIDGE_ADDRESS}\n")
        sandbox = probe_image_name(self._control_plane.binaries.probe)
        for name, with_kubelet in (("containerd", True), ("containerd-sweep", False)):
            text = containerd_config(
                sandbox_image=sandbox, plugins=plugins, registries=self._registries, for_kubelet=with_kubelet
            )
            (self._configs / f"{name}.toml").write_text(text)
        kubelet = kubelet_config(
            address=self.place.address,
            cgroup=cgroup_of(self.place.name),
            authority=authority.certificate,
            serving=serving,
            resolver=self._configs / "resolv.conf",
        )
        (self._configs / "kubelet.json").write_text(json.dumps(kubelet, indent=2))
        network_config = self._private / "etc/cni/net.d/10-bridge.conflist"
        network_config.write_text(json.dumps(network_plugins_config(self.place.pod_range), indent=2))

    def pull_without_tls(self, registry: str) -> None:
        """Let the container runtime pull from a registry (`host:port`) without TLS."""
        file = self._registries / registry / "hosts.toml"
        file.parent.mkdir(parents=True)
        file.write_text(plain_http_registry(registry))

    @property
    def _configs(self) -> Path:
        return self._directory / "config"

    @property
    def _registries(self) -> Path:
        return self._configs / "registries"

    @property
    def _subject(self) -> str:
        return f"/O=system:nodes/CN=system:node:{self.place.name}"

    def _has_containers(self) -> bool:
        kept = self._images / "io.containerd.grpc.v1.cri"
        return any(any((kept / kind).glob("*")) for kind in ("containers", "sandboxes"))

    def _start_containerd(self, name: str) -> Component:
        component = self._run(name, *self.command("containerd", "--config", self._configs / f"{name}.toml"))
        self._control_plane.wait_until(self._containerd_answers, f"{self.place.name}'s {name} to answer")
        return component

    def _containerd_answers(self) -> bool:
        try:
            self.images.names()
        except ClusterError:
            return False
        return True

    def _inside(self, component: Component) -> list[int]:
        """PIDs of the processes that `command` started: nsenter waits for them outside and forwards no signal."""
        pid = component.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def _load_sandbox_image(self) -> None:
        probe = self._control_plane.binaries.probe
        name = probe_image_name(probe)
        if name not in self.images.names():
            archive = self._directory / "probe.tar"
            write_program_image(archive, probe, ["pause"])
            self.images.load(archive, name)

    def _start_kubelet(self) -> None:
        authority = self._control_plane.authority
        identity = authority.sign(self.place.name, self._subject, "clientAuth")
        kubeconfig = authority.kubeconfig(self.place.name, self._control_plane.server, identity)
        self._run(
            "kubelet",
            *self.command(self._control_plane.binaries.kube, "kubelet"),
            *(f"--config={self._configs / 'kubelet.json'}", f"--kubeconfig={kubeconfig}"),
            *(f"--hostname-override={self.place.name}", f"--node-ip={self.place.address}"),
        )

    def _start_kube_proxy(self) -> None:
        authority = self._control_plane.authority
        identity = authority.sign("kube-proxy", "/CN=system:kube-proxy", "clientAuth")
        kubeconfig = authority.kubeconfig("kube-proxy", self._control_plane.server, identity)
        self._run(
            "kube-proxy",
            *self.command(self._control_plane.binaries.kube, "kube-proxy"),
            *(f"--kubeconfig={kubeconfig}", f"--hostname-override={self.place.name}", "--proxy-mode=nftables"),
            *(f"--bind-address={self.place.address}", f"--cluster-cidr={network.ALL_PODS_RANGE}"),
            f"--healthz-bind-address={self.place.address}:{_KUBE_PROXY_HEALTH_PORT}",
            # These settings apply to the whole machine and cannot be written from a network namespace, so they are not set.
            *("--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"),
            "--conntrack-tcp-timeout-close-wait=0",
        )

    def _is_ready(self) -> bool:
        node = self._control_plane.api.read_object(f"/api/v1/nodes/{self.place.name}")
        if node is None:
            return False
        conditions = {condition["type"]: condition["status"] for condition in node["status"].get("conditions", [])}
        return conditions.get("Ready") == "True" and network.answers(self.place.address, _KUBE_PROXY_HEALTH_PORT, "/healthz")

    def _stop(self) -> None:
        if self._holder is not None and self._holder.process.poll() is None:
            # unshare ends with its child, and the kernel ends process 1 only after all other processes of its namespace.
            try:
                os.kill(self.first_process(), signal.SIGKILL)
            except (OSError, IndexError):
                self._holder.kill()  # the node's process 1 was not started yet
            self._holder.process.wait(_END_SECONDS)
        remove_node_cgroups(self.place.name)
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._first is not None:
            shutil.rmtree(self._images.parent, ignore_errors=True)
        for directory in reversed(self._made):
            with suppress(OSError):  # directories of another node are in it
                directory.rmdir()


def link_images(source: Path, target: Path) -> None:
    """Give the container runtime at `target` the images of the runtime at `source`, which must be paused.

    Importing an image of six gigabytes takes minutes and the same disk space again. A runtime never writes to unpacked files, so
    two nodes can share them: each has its own hard links, and only the databases, which do change, are copied. `target` is
    emptied first. Both must be on one file system.
    """
    shutil.rmtree(target, ignore_errors=True)
    for linked in (_CONTENT, f"{_SNAPSHOTS}/snapshots"):
        (target / linked).parent.mkdir(parents=True, exist_ok=True)
        run_command("cp", "--archive", "--link", source / linked, target / linked)
    for database in _DATABASES:
        (target / database).parent.mkdir(parents=True, exist_ok=True)
        run_command("cp", "--archive", source / database, target / database)
