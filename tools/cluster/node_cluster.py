"""The whole test cluster: a control plane on a private bridge, cluster DNS and real nodes."""

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tools.cluster import network
from tools.cluster.access import ClusterAccess
from tools.cluster.binaries import ensure_binaries
from tools.cluster.control_plane import LOOPBACK, ControlPlane, Endpoint, NodeLoss, free_ports
from tools.cluster.errors import ClusterError
from tools.cluster.images import probe_image_name
from tools.cluster.network import NodeNetwork
from tools.cluster.node import Node
from tools.cluster.policy_enforcer import PolicyEnforcer
from tools.cluster.processes import without_proxies
from tools.cluster.requirements import ensure_packages

ON_BRIDGE = Endpoint(address=network.BRIDGE_ADDRESS, service_range=network.SERVICE_RANGE, published=True)
NODE_LOSS = NodeLoss(grace_seconds=16, toleration_seconds=2)
"""Shorter times than in a real cluster, which waits 50 seconds and then five minutes."""

_COREFILE = """.:53 {{
    bind {address}
    ready {readiness}
    errors
    cache 30
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 30
    }}
}}
"""
"""CoreDNS's configuration, as by kubeadm; in particular, the answer that a name does not exist is cached for up to 30 s."""


class NodeCluster(ClusterAccess):
    """Context manager for a cluster that really runs pods. A machine can have only one: a second waits for the first to end.

    It starts with one node; `add_node` starts the others. Pods reach only each other, this machine's bridge address and
    the API server (by the `kubernetes` Service). NetworkPolicies are enforced inside `enforced_policies`. `load_image`
    adds images; pods that use them need an imagePullPolicy other than Always.
    """

    def __init__(self, most_nodes: int = 1) -> None:
        self.keep_logs = False
        """Set this to keep the logs of a failure that the context manager does not see."""
        self._places = [NodeNetwork(number + 1) for number in range(most_nodes)]
        self.nodes: list[Node] = []

    def __enter__(self) -> "NodeCluster":
        ensure_packages()
        ensure_binaries()
        with ExitStack() as stack:
            stack.enter_context(network.reserve_machine())
            stack.callback(network.remove_network)
            network.create_network(self._places)
            loss = NODE_LOSS if len(self._places) > 1 else None
            self.control_plane = stack.enter_context(ControlPlane(ON_BRIDGE, loss))
            binaries = self.control_plane.binaries
            super().__init__(
                kubeconfig=self.control_plane.kubeconfig,
                scratch=self.control_plane.run.path,
                kubectl=(str(binaries.kube), "kubectl"),
                helm=(str(binaries.helm),),
                environment=without_proxies(os.environ),
            )
            self._start_dns()
            self._stack = stack
            self.add_node()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.control_plane.keep_logs = self.keep_logs
        self._stack.__exit__(kind, error, trace)

    @property
    def node(self) -> Node:
        """The first node."""
        return self.nodes[0]

    def node_named(self, name: str) -> Node:
        """The node with this name."""
        return next(node for node in self.nodes if node.place.name == name)

    def add_node(self) -> Node:
        """Start another node with the images of the first; it ends with the cluster.

        Raises:
            ClusterError: the cluster has `most_nodes` already, or the node did not start.
        """
        if len(self.nodes) == len(self._places):
            raise ClusterError(f"the cluster can have {len(self._places)} nodes: raise most_nodes")
        first = self.nodes[0] if self.nodes else None
        node = self._stack.enter_context(Node(self.control_plane, self._places[len(self.nodes)], first))
        self.nodes.append(node)
        return node

    def enforced_policies(self) -> PolicyEnforcer:
        """Return a context manager inside which all nodes, including those added later, enforce NetworkPolicies."""
        return PolicyEnforcer(self.control_plane.api, self._places)

    @property
    def probe_image(self) -> str:
        """Name of the image of `cluster_go/probe`, which every node has."""
        return probe_image_name(self.control_plane.binaries.probe)

    def has_image(self, name: str) -> bool:
        """Whether the first node has this image, perhaps from an earlier run. If so, `load_image` does nothing."""
        return name in self.node.images.names()

    def load_image(self, archive: Path, name: str) -> None:
        """Make the image in an OCI archive available to pods as `name`. Does nothing if the name exists.

        Args:
            archive: OCI archive, as `buildah push IMAGE oci-archive:FILE` writes it.
            name: full name with a registry and a tag. A tag must always mean the same content. Other tags of the same
                repository are removed.

        Raises:
            ClusterError: there are further nodes, which got their images from the first when they were added.
        """
        if len(self.nodes) > 1:
            raise ClusterError(f"{name} would be on the first node only: load images before add_node")
        self.node.images.load(archive, name)

    def _start_dns(self) -> None:
        plane = self.control_plane
        (port,) = free_ports(LOOPBACK, 1)
        corefile = plane.run.path / "Corefile"
        corefile.write_text(
            _COREFILE.format(address=network.BRIDGE_ADDRESS, readiness=f"{LOOPBACK}:{port}", kubeconfig=plane.kubeconfig)
        )
        plane.start("coredns", plane.binaries.coredns, "-conf", corefile)
        plane.wait_until(lambda: network.answers(LOOPBACK, port, "/ready"), "CoreDNS to be ready")
