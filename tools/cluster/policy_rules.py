"""What NetworkPolicies allow each pod, computed from the objects as the API server returns them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Document = Mapping[str, Any]

ANYWHERE = "0.0.0.0/0"
_ALL_PORTS = (1, 65535)
_ENDED = ("Succeeded", "Failed")
"""Phases of pods whose address may have been given to another pod."""


@dataclass(frozen=True)
class Ports:
    """Ports of one protocol."""

    protocol: str
    """tcp, udp or sctp."""
    first: int
    last: int
    """Last port, inclusive."""


@dataclass(frozen=True)
class Flow:
    """Connections that a pod may open (egress) or accept (ingress)."""

    peers: tuple[str, ...]
    """IPv4 addresses and ranges."""
    ports: tuple[Ports, ...] = ()
    """Allowed ports; empty for all ports of all protocols."""
    excluded: tuple[str, ...] = ()
    """Ranges within the peers that are not allowed."""


@dataclass(frozen=True)
class PodRules:
    """Allowed connections of one pod. None: no policy applies to this direction, so everything is allowed."""

    address: str
    ingress: tuple[Flow, ...] | None
    egress: tuple[Flow, ...] | None


@dataclass(frozen=True)
class _Pod:
    namespace: str
    labels: Mapping[str, str]
    address: str
    named_ports: Mapping[tuple[str, str], int]
    """Ports by protocol and name."""


def pod_rules(policies: Iterable[Document], pods: Iterable[Document], namespaces: Iterable[Document]) -> list[PodRules]:
    """Return the rules of every pod that a policy selects, in the order of the pods.

    Pods without an address, pods that have ended, and pods in the node's own network are neither subjects nor peers.
    """
    running = [pod for pod in map(_read_pod, pods) if pod is not None]
    labels = {item["metadata"]["name"]: item["metadata"].get("labels") or {} for item in namespaces}
    known = [(policy["metadata"]["namespace"], policy["spec"]) for policy in policies]
    rules: list[PodRules] = []
    for pod in running:
        chosen = [spec for namespace, spec in known if namespace == pod.namespace and _matches(spec["podSelector"], pod.labels)]
        ingress = [spec for spec in chosen if "Ingress" in _policy_types(spec)]
        egress = [spec for spec in chosen if "Egress" in _policy_types(spec)]
        if chosen:
            rules.append(
                PodRules(
                    pod.address,
                    ingress=_flows(ingress, "ingress", "from", pod, pods=running, namespaces=labels) if ingress else None,
                    egress=_flows(egress, "egress", "to", pod, pods=running, namespaces=labels) if egress else None,
                )
            )
    return rules


def _read_pod(document: Document) -> _Pod | None:
    spec, status, metadata = document["spec"], document.get("status", {}), document["metadata"]
    address = status.get("podIP")
    if not address or spec.get("hostNetwork") or status.get("phase") in _ENDED:
        return None
    ports = [port for container in spec["containers"] for port in container.get("ports", []) if port.get("name")]
    named = {(port.get("protocol", "TCP"), port["name"]): port["containerPort"] for port in ports}
    return _Pod(metadata["namespace"], metadata.get("labels") or {}, address, named)


def _policy_types(spec: Document) -> Sequence[str]:
    types: Sequence[str] = spec.get("policyTypes") or ("Ingress", *(["Egress"] if "egress" in spec else []))
    return types


def _flows(
    specs: Iterable[Document],
    direction: str,
    side: str,
    subject: _Pod,
    *,
    pods: Sequence[_Pod],
    namespaces: Mapping[str, Mapping[str, str]],
) -> tuple[Flow, ...]:
    flows: list[Flow] = []
    for rule in (rule for spec in specs for rule in spec.get(direction) or []):
        for port in rule.get("ports") or []:
            if "endPort" in port or (direction == "egress" and isinstance(port.get("port"), str)):
                raise ValueError(f"port ranges, and port names in egress rules, are not supported: {port}")
        # A port name refers to a port of the pod that accepts the connection.
        ports = tuple(read for port in rule.get("ports") or [] if (read := _port(port, subject)) is not None)
        if rule.get("ports") and not ports:
            continue
        for peer in rule.get(side) or [{"ipBlock": {"cidr": ANYWHERE}}]:
            block = peer.get("ipBlock")
            if block is None:
                chosen = tuple(pod.address for pod in pods if _selects(peer, pod, subject.namespace, namespaces))
                flows += [Flow(chosen, ports)] if chosen else []
            elif ":" not in block["cidr"]:  # nodes and pods of the test cluster have no IPv6
                flows.append(Flow((block["cidr"],), ports, tuple(block.get("except") or [])))
    return tuple(flows)


def _port(port: Document, pod: _Pod) -> Ports | None:
    """Return a port by its number or, in the pod that accepts the connection, by its name."""
    protocol, number = port.get("protocol", "TCP"), port.get("port")
    if isinstance(number, str):
        number = pod.named_ports.get((protocol, number))
        if number is None:
            return None
    first, last = _ALL_PORTS if number is None else (number, number)
    return Ports(protocol.lower(), first, last)


def _selects(peer: Document, pod: _Pod, own_namespace: str, namespaces: Mapping[str, Mapping[str, str]]) -> bool:
    selector = peer.get("namespaceSelector")
    of_namespace = namespaces.get(pod.namespace, {})
    in_namespace = pod.namespace == own_namespace if selector is None else _matches(selector, of_namespace)
    return in_namespace and _matches(peer.get("podSelector") or {}, pod.labels)


def _matches(selector: Document, labels: Mapping[str, str]) -> bool:
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    expressions = selector.get("matchExpressions") or []
    if unknown := {expression["operator"] for expression in expressions} - {"In"}:
        raise ValueError(f"these operators of selectors are not supported: {unknown}")
    return all(labels.get(expression["key"]) in expression["values"] for expression in expressions)
