"""The network between this machine and the node: a bridge, a network namespace, and routes that let nothing out.

This machine holds the bridge's address, on which the API server and the DNS server listen. The node has no default
route. Blackhole routes catch what is addressed to a pod or a Service that does not exist; they are set first, so
that at no moment such a packet takes this machine's default route.
"""

import http.client
import ipaddress
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

from tests.support.cluster.errors import ClusterError, wait_until
from tests.support.cluster.processes import run_command

BRIDGE_ADDRESS = "172.30.0.1"
NODE_ADDRESS = "172.30.0.11"
POD_RANGE = "10.244.1.0/24"
"""Addresses of the node's pods."""
SERVICE_RANGE = "10.96.0.0/16"
NODE_NAMESPACE = "finetune-test-node"
"""Name of the node's network namespace."""

_BRIDGE = "finetune-br0"
_VETH = "finetune-veth0"
_BRIDGE_RANGE = "172.30.0.0/24"
_OWN_RANGES = (_BRIDGE_RANGE, POD_RANGE, SERVICE_RANGE)
_BLACKHOLED = ("10.244.0.0/16", SERVICE_RANGE)
_LAST_RESORT = "9999"
"""Route metric of the blackholes: any real route wins."""

_PLACE = f"\0{NODE_NAMESPACE}"
"""Abstract address of the Unix socket that stands for the machine's one place for a node."""

_OTHER_NODE_SECONDS = 1800.0


def reserve_node() -> socket.socket:
    """Take the only place for a node on this machine, waiting while another test run has it; close it to give it back.

    The name lives in the kernel, for this network namespace, and vanishes with the process that holds it.

    Raises:
        ClusterError: this very process has it already, or another run still had it after half an hour.
    """
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def taken() -> bool:
        try:
            holder.bind(_PLACE)
        except OSError:
            if _place_holder() == os.getpid():
                raise ClusterError("this process runs a node already, and one machine holds one: share it") from None
            return False
        holder.listen()
        return True

    try:
        wait_until(taken, "another test run to end its node (one machine holds one)", _OTHER_NODE_SECONDS)
    except BaseException:
        holder.close()
        raise
    return holder


def _place_holder() -> int | None:
    """Return the PID of the process that has the place, or None when it has just been given back."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.connect(_PLACE)
        except OSError:
            return None
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def create_network() -> None:
    """Make the bridge, the node's namespace and all routes, replacing what a killed run left."""
    remove_network()
    for blackholed in _BLACKHOLED:
        run_command("ip", "route", "replace", "blackhole", blackholed, "metric", _LAST_RESORT)
    run_command("ip", "link", "add", _BRIDGE, "type", "bridge")
    run_command("ip", "addr", "add", f"{BRIDGE_ADDRESS}/24", "dev", _BRIDGE)
    run_command("ip", "link", "set", _BRIDGE, "up")
    run_command("ip", "netns", "add", NODE_NAMESPACE)
    run_command("ip", "link", "add", _VETH, "type", "veth", "peer", "name", "eth0", "netns", NODE_NAMESPACE)
    run_command("ip", "link", "set", _VETH, "master", _BRIDGE, "up")

    in_node = ("ip", "-n", NODE_NAMESPACE)
    run_command(*in_node, "route", "add", "blackhole", _BLACKHOLED[0], "metric", _LAST_RESORT)
    run_command(*in_node, "link", "set", "lo", "up")
    run_command(*in_node, "addr", "add", f"{NODE_ADDRESS}/24", "dev", "eth0")
    run_command(*in_node, "link", "set", "eth0", "up")
    # kube-proxy rewrites packets to a Service before they leave; what it does not know meets this machine's blackhole.
    run_command(*in_node, "route", "add", SERVICE_RANGE, "via", BRIDGE_ADDRESS)
    run_command("nsenter", f"--net=/run/netns/{NODE_NAMESPACE}", "sysctl", "--quiet", "--write", "net.ipv4.ip_forward=1")
    run_command("ip", "route", "replace", POD_RANGE, "via", NODE_ADDRESS, "dev", _BRIDGE)


def remove_network() -> None:
    """Remove whatever of the network exists; routes over the bridge go with it."""
    if Path(f"/run/netns/{NODE_NAMESPACE}").exists():
        run_command("ip", "netns", "del", NODE_NAMESPACE)
    links = {link["ifname"] for link in _ip("link", "show")}
    for name in (_VETH, _BRIDGE):
        if name in links:
            run_command("ip", "link", "del", name)
    for blackholed in _BLACKHOLED:
        if _ip("route", "show", "type", "blackhole", "exact", blackholed):
            run_command("ip", "route", "del", "blackhole", blackholed, "metric", _LAST_RESORT)


def traces() -> list[str]:
    """Return what exists of the cluster's network on this machine: nothing, when no node is running."""
    links = [link["ifname"] for link in _ip("link", "show") if link["ifname"] in {_VETH, _BRIDGE}]
    namespaces = [one["name"] for one in _ip("netns", "list") if one["name"] == NODE_NAMESPACE]
    routes = [one for one in (*_BLACKHOLED, POD_RANGE) if _ip("route", "show", "table", "all", "exact", one)]
    return [
        *(f"link {name}" for name in links),
        *(f"network namespace {name}" for name in namespaces),
        *(f"route {destination}" for destination in routes),
    ]


def foreign_route() -> str | None:
    """Return a route of this machine that is not ours and overlaps the cluster's addresses, or None."""
    own = [ipaddress.ip_network(one) for one in _OWN_RANGES]
    for route in _ip("-4", "route", "show"):
        ours = route.get("dev") == _BRIDGE or route.get("type") == "blackhole"
        if route["dst"] == "default" or ours:
            continue
        if any(ipaddress.ip_network(route["dst"]).overlaps(one) for one in own):
            return f"route to {route['dst']} by {route.get('dev')}"
    return None


def answers(address: str, port: int, path: str) -> bool:
    """Whether a plain HTTP server there answers 200."""
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
