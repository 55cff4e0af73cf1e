"""The network between this machine and the nodes: a bridge, a network namespace for each node, and routes between them.

This machine has the bridge's address, on which the API server and the DNS server listen. A node has no default route.
Blackhole routes drop packets to a pod or Service that does not exist. They are set first, so that no such packet ever
takes this machine's default route.
"""

import http.client
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tools.cluster.errors import ClusterError, wait_until
from tools.cluster.processes import run_command

BRIDGE_ADDRESS = "172.30.0.1"
SERVICE_RANGE = "10.96.0.0/16"
ALL_PODS_RANGE = "10.244.0.0/16"
"""Addresses of all nodes' pods."""

_BRIDGE = "finetune-br0"
_BRIDGE_RANGE = "172.30.0.0/24"
_VETH_PREFIX = "finetune-veth"
_NAMESPACE_PREFIX = "finetune-test-node-"
_OWN_RANGES = (_BRIDGE_RANGE, ALL_PODS_RANGE, SERVICE_RANGE)
_BLACKHOLED = (ALL_PODS_RANGE, SERVICE_RANGE)
_LAST_RESORT = "9999"
"""Route metric of the blackholes: any real route wins."""

_PLACE = "\0finetune-test-node"
"""Abstract address of the Unix socket that serves as a lock, because a machine can have only one cluster with nodes."""

_OTHER_CLUSTER_SECONDS = 1800.0


@dataclass(frozen=True)
class NodeNetwork:
    """Names and addresses of one node."""

    number: int
    """Number of the node, from 1."""

    @property
    def name(self) -> str:
        """Name of the node."""
        return f"node-{self.number}"

    @property
    def namespace(self) -> str:
        """Name of its network namespace."""
        return f"{_NAMESPACE_PREFIX}{self.number}"

    @property
    def veth(self) -> str:
        """Name of the end of its veth pair on the bridge."""
        return f"{_VETH_PREFIX}{self.number}"

    @property
    def address(self) -> str:
        """Its address on the bridge."""
        return f"172.30.0.{10 + self.number}"

    @property
    def pod_range(self) -> str:
        """Addresses of its pods."""
        return f"10.244.{self.number}.0/24"


def reserve_machine() -> socket.socket:
    """Reserve this machine for a cluster with nodes; wait while another test run has reserved it. Close the result to release it.

    The socket's name exists in the kernel, for this network namespace, and vanishes with the process that holds it.

    Raises:
        ClusterError: this process has reserved the machine already, or another run did not release it within half an hour.
    """
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def taken() -> bool:
        try:
            holder.bind(_PLACE)
        except OSError:
            if _place_holder() == os.getpid():
                raise ClusterError(
                    "this process already has a cluster with nodes, and a machine can have only one: share it"
                ) from None
            return False
        holder.listen()
        return True

    try:
        wait_until(taken, "another test run to end its nodes (a machine can have only one cluster)", _OTHER_CLUSTER_SECONDS)
    except BaseException:
        holder.close()
        raise
    return holder


def _place_holder() -> int | None:
    """Return the PID of the process that has reserved the machine, or None if it has just released it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.connect(_PLACE)
        except OSError:
            return None
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def create_network(nodes: Sequence[NodeNetwork]) -> None:
    """Create the bridge, the nodes' namespaces and all routes. Replaces those that a killed run has left."""
    remove_network()
    for blackholed in _BLACKHOLED:
        run_command("ip", "route", "replace", "blackhole", blackholed, "metric", _LAST_RESORT)
    run_command("ip", "link", "add", _BRIDGE, "type", "bridge")
    run_command("ip", "addr", "add", f"{BRIDGE_ADDRESS}/24", "dev", _BRIDGE)
    run_command("ip", "link", "set", _BRIDGE, "up")
    for node in nodes:
        _create_node_network(node, [other for other in nodes if other != node])


def _create_node_network(node: NodeNetwork, others: Sequence[NodeNetwork]) -> None:
    run_command("ip", "netns", "add", node.namespace)
    run_command("ip", "link", "add", node.veth, "type", "veth", "peer", "name", "eth0", "netns", node.namespace)
    run_command("ip", "link", "set", node.veth, "master", _BRIDGE, "up")

    in_node = ("ip", "-n", node.namespace)
    run_command(*in_node, "route", "add", "blackhole", ALL_PODS_RANGE, "metric", _LAST_RESORT)
    run_command(*in_node, "link", "set", "lo", "up")
    run_command(*in_node, "addr", "add", f"{node.address}/24", "dev", "eth0")
    run_command(*in_node, "link", "set", "eth0", "up")
    # kube-proxy rewrites packets to a Service before they leave; this machine's blackhole drops those to unknown Services.
    run_command(*in_node, "route", "add", SERVICE_RANGE, "via", BRIDGE_ADDRESS)
    for other in others:
        run_command(*in_node, "route", "add", other.pod_range, "via", other.address)
    run_command("nsenter", f"--net=/run/netns/{node.namespace}", "sysctl", "--quiet", "--write", "net.ipv4.ip_forward=1")
    run_command("ip", "route", "replace", node.pod_range, "via", node.address, "dev", _BRIDGE)


def disconnect(node: NodeNetwork) -> None:
    """Disconnect the node: its processes continue, but reach neither the API server nor other nodes."""
    run_command("ip", "link", "set", node.veth, "down")


def connect(node: NodeNetwork) -> None:
    """Connect the node again."""
    run_command("ip", "link", "set", node.veth, "up")


@contextmanager
def outside_address(address: str, nodes: Sequence[NodeNetwork]) -> Iterator[None]:
    """Give this machine another address that nodes and pods reach, to simulate a server outside the cluster."""
    run_command("ip", "addr", "add", f"{address}/32", "dev", _BRIDGE)
    for node in nodes:
        run_command("ip", "-n", node.namespace, "route", "add", address, "via", BRIDGE_ADDRESS)
    yield
    for node in nodes:
        run_command("ip", "-n", node.namespace, "route", "del", address)
    run_command("ip", "addr", "del", f"{address}/32", "dev", _BRIDGE)


@contextmanager
def address_of_node(address: str, node: NodeNetwork) -> Iterator[None]:
    """Give a node another address that only its own pods reach, like the metadata service of a cloud."""
    run_command("ip", "-n", node.namespace, "addr", "add", f"{address}/32", "dev", "lo")
    yield
    run_command("ip", "-n", node.namespace, "addr", "del", f"{address}/32", "dev", "lo")


def remove_network() -> None:
    """Remove all existing parts of the network; routes over the bridge disappear with it."""
    # Links are removed first: the kernel removes those of a namespace only some time after the namespace.
    for link in _ip("link", "show"):
        if link["ifname"].startswith((_VETH_PREFIX, _BRIDGE)):
            run_command("ip", "link", "del", link["ifname"])
    for namespace in _ip("netns", "list"):
        if namespace["name"].startswith(_NAMESPACE_PREFIX):
            run_command("ip", "netns", "del", namespace["name"])
    for blackholed in _BLACKHOLED:
        if _ip("route", "show", "type", "blackhole", "exact", blackholed):
            run_command("ip", "route", "del", "blackhole", blackholed, "metric", _LAST_RESORT)


def foreign_route() -> str | None:
    """Return a route of this machine that is not ours but overlaps the cluster's addresses, or None."""
    own = [ipaddress.ip_network(addresses) for addresses in _OWN_RANGES]
    for route in _ip("-4", "route", "show"):
        ours = route.get("dev") == _BRIDGE or route.get("type") == "blackhole"
        if route["dst"] == "default" or ours:
            continue
        if any(ipaddress.ip_network(route["dst"]).overlaps(addresses) for addresses in own):
            return f"route to {route['dst']} by {route.get('dev')}"
    return None


def answers(address: str, port: int, path: str) -> bool:
    """Whether an HTTP server at this address answers 200."""
    connection = http.client.HTTPConnection(address, port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _ip(*arguments: str) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = json.loads(run_command("ip", "-json", *arguments) or "[]")
    return parsed
