"""Enforces NetworkPolicies on the test cluster's nodes, as a network plugin of a real cluster does.

A new policy or pod takes effect within half a second. Until then a pod is not restricted; network plugins differ in that.
"""

import http.client
import json
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from tools.cluster.api import ApiReader
from tools.cluster.errors import ClusterError
from tools.cluster.network import NodeNetwork
from tools.cluster.policy_rules import ANYWHERE, Flow, PodRules, Ports, pod_rules
from tools.cluster.processes import run_command

_POLL_SECONDS = 0.5
_SETTLE_SECONDS = 30.0
_POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"
_PODS = "/api/v1/pods"
_NAMESPACES = "/api/v1/namespaces"
_TABLE = "finetune-policies"
"""Name of the nftables table of family ip."""
_ESTABLISHED = "ct state established,related accept"


class PolicyEnforcer:
    """Context manager that runs a thread to keep the rules of all nodes up to date, and removes the rules at the end."""

    def __init__(self, api: ApiReader, nodes: Sequence[NodeNetwork]) -> None:
        self._api = api
        self._nodes = nodes
        self._applied: str | None = None
        self._rounds = 0
        """Number of rounds that have begun."""
        self._finished = 0
        """The last round whose rules are in effect."""
        self._changed = threading.Condition()
        self._stopping = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="policy-enforcer", daemon=True)

    def __enter__(self) -> "PolicyEnforcer":
        self._thread.start()
        try:
            self.settle()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()
        if self._error is not None and error is None:
            raise ClusterError("the enforcement of NetworkPolicies ended early") from self._error

    def settle(self) -> None:
        """Wait until the policies and pods that the API server has now are enforced.

        Raises:
            ClusterError: the thread has ended with an error, or the API server did not answer for half a minute.
        """
        with self._changed:
            wanted = self._rounds + 1
            self._changed.wait_for(lambda: self._finished >= wanted or self._error is not None, _SETTLE_SECONDS)
            if self._error is not None or self._finished < wanted:
                raise ClusterError("NetworkPolicies are not enforced") from self._error

    def _run(self) -> None:
        try:
            connection = self._api.connect()
            while not self._stopping:
                with self._changed:
                    self._rounds += 1
                    current = self._rounds
                try:
                    objects = [_items(connection, path) for path in (_POLICIES, _PODS, _NAMESPACES)]
                except (OSError, http.client.HTTPException):
                    connection.close()  # the next request opens it again
                else:
                    self._apply(ruleset(pod_rules(*objects)))
                    with self._changed:
                        self._finished = current
                        self._changed.notify_all()
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, _POLL_SECONDS)
            connection.close()
        except Exception as error:  # noqa: BLE001 - settle and the end of the context report it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _apply(self, text: str) -> None:
        if text == self._applied:
            return
        for node in self._nodes:
            _nft(node, text)
        self._applied = text

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        for node in self._nodes:
            _nft(node, removal())


def _nft(node: NodeNetwork, text: str) -> None:
    run_command("nsenter", f"--net=/run/netns/{node.namespace}", "nft", "-f", "-", stdin=text)


def _items(connection: http.client.HTTPSConnection, path: str) -> list[dict[str, Any]]:
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise http.client.HTTPException(f"{response.status} for {path}")
    items: list[dict[str, Any]] = json.loads(body)["items"]
    return items


def removal() -> str:
    """Input of `nft -f` that removes the table if it exists."""
    return f"table ip {_TABLE}\ndelete table ip {_TABLE}\n"


def ruleset(rules: Sequence[PodRules]) -> str:
    """Input of `nft -f` that replaces all rules at once.

    Packets between pods of one node pass the forward hook, because the kernel passes bridged packets to it; packets to the node
    itself pass the input hook. Both come after the translation of Service addresses. A node always reaches its own pods.
    """
    egress = {pod.address: pod.egress for pod in rules if pod.egress is not None}
    ingress = {pod.address: pod.ingress for pod in rules if pod.ingress is not None}
    return "\n".join(
        [
            f"{removal()}table ip {_TABLE} {{",
            *_chain("forward", "type filter hook forward priority filter", _ESTABLISHED, "jump egress", "jump ingress"),
            *_chain("input", "type filter hook input priority filter", _ESTABLISHED, "jump egress"),
            *_chain("egress", *_dispatch("saddr", "egress", egress)),
            *_chain("ingress", *_dispatch("daddr", "ingress", ingress)),
            *(line for address, flows in egress.items() for line in _pod_chain("egress", address, "daddr", flows)),
            *(line for address, flows in ingress.items() for line in _pod_chain("ingress", address, "saddr", flows)),
            "}\n",
        ]
    )


def _chain(name: str, *lines: str) -> list[str]:
    return [f"  chain {name} {{", *(f"    {line};" for line in lines), "  }"]


def _dispatch(field: str, direction: str, addresses: Iterable[str]) -> list[str]:
    elements = ", ".join(f"{address} : jump {direction}-{address}" for address in addresses)
    return [f"ip {field} vmap {{ {elements} }}"] if elements else []


def _pod_chain(direction: str, address: str, field: str, flows: Iterable[Flow]) -> list[str]:
    allowed = [f"{_peers(field, flow)}{match}return" for flow in flows for match in _ports(flow.ports)]
    return _chain(f"{direction}-{address}", *allowed, "drop")


def _peers(field: str, flow: Flow) -> str:
    included = "" if flow.peers == (ANYWHERE,) else f"ip {field} {_set(flow.peers)} "
    return included + (f"ip {field} != {_set(flow.excluded)} " if flow.excluded else "")


def _ports(ports: Iterable[Ports]) -> list[str]:
    """Return a match for each protocol, or a single match for everything if there are no ports."""
    by_protocol: dict[str, list[str]] = {}
    for part in ports:
        numbers = f"{part.first}-{part.last}" if part.last > part.first else f"{part.first}"
        by_protocol.setdefault(part.protocol, []).append(numbers)
    return [f"{protocol} dport {_set(numbers)} " for protocol, numbers in by_protocol.items()] or [""]


def _set(elements: Iterable[str]) -> str:
    return f"{{ {', '.join(dict.fromkeys(elements))} }}"
