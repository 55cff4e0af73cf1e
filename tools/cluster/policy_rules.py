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
    """Inclusive."""


@dataclass(frozen=True)
class Flow:
    """Connections that a pod may open (egress) or accept (ingress)."""

    peers: tuple[str, ...]
    """IPv4 addresses and ranges."""
    ports: tuple[Ports, ...] = ()
    """Empty: every port of every protocol."""
    excluded: tuple[str, ...] = ()
    """Ranges within the peers that are not allowed."""


@dataclass(frozen=True)
class PodRules:
    """What one pod is allowed. None: no policy speaks of this direction, so everything is allowed."""

    address: str
    ingress: tuple[Flow, ...] | None
    egress: tuple[Flow, ...] | None


@dataclass(frozen=True)
class _Pod:
    namespace: str
    labels: Mapping[str, str]
    address: str
    named_ports: Mapping[tuple[str, str], int]
    """By protocol and name."""


def pod_rules(policies: Iterable[Document], pods: Iterable[Document], namespaces: Iterable[Document]) -> list[PodRules]:
    """Return the rules of every pod that a policy selects, in the order of the pods.

    Pods without an address, pods that have ended, and pods in the node's own network are neither subjects nor peers.
    """
    running = [pod for pod in map(_read_pod, pods) if pod is not None]
    labels = {one["metadata"]["name"]: one["metadata"].get("labels") or {} for one in namespaces}
    known = [(one["metadata"]["namespace"], one["spec"]) for one in policies]
    found: list[PodRules] = []
    for pod in running:
        chosen = [spec for namespace, spec in known if namespace == pod.namespace and _matches(spec["podSelector"], pod.labels)]
        ingress = [spec for spec in chosen if "Ingress" in _policy_types(spec)]
        egress = [spec for spec in chosen if "Egress" in _policy_types(spec)]
        if chosen:
            found.append(
                PodRules(
                    pod.address,
                    ingress=_flows(ingress, "ingress", "from", pod, pods=running, namespaces=labels) if ingress else None,
                    egress=_flows(egress, "egress", "to", pod, pods=running, namespaces=labels) if egress else None,
                )
            )
    return found


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
    for spec in specs:
        for rule in spec.get(direction) or []:
            ports = rule.get("ports") or []
            named = [port for port in ports if isinstance(port.get("port"), str)]
            numbers = tuple(_numbered(port) for port in ports if port not in named)
            peers = [
                peer
                for one in rule.get(side) or [{"ipBlock": {"cidr": ANYWHERE}}]
                for peer in _peers(one, subject, pods, namespaces)
            ]
            # A name means the port of that name in the pod that accepts the connection.
            if direction == "ingress":
                numbers += _resolved(named, subject)
            if not ports or numbers:
                flows += [Flow(addresses, numbers, excluded) for addresses, excluded, _ in peers]
            if direction == "egress" and named:
                accepting = pods if not rule.get(side) else [pod for _, _, members in peers for pod in members]
                flows += [Flow((pod.address,), resolved) for pod in accepting if (resolved := _resolved(named, pod))]
    return tuple(flows)


def _peers(
    peer: Document, subject: _Pod, pods: Sequence[_Pod], namespaces: Mapping[str, Mapping[str, str]]
) -> list[tuple[tuple[str, ...], tuple[str, ...], list[_Pod]]]:
    """Addresses, those excluded of them, and the pods that were selected; nothing if no pod is selected."""
    block = peer.get("ipBlock")
    if block is not None:
        # Nodes and pods of the test cluster have no IPv6.
        return [] if ":" in block["cidr"] else [((block["cidr"],), tuple(block.get("except") or []), [])]
    chosen = [pod for pod in pods if _selects(peer, pod, subject.namespace, namespaces)]
    return [(tuple(pod.address for pod in chosen), (), chosen)] if chosen else []


def _selects(peer: Document, pod: _Pod, own_namespace: str, namespaces: Mapping[str, Mapping[str, str]]) -> bool:
    selector = peer.get("namespaceSelector")
    of_namespace = namespaces.get(pod.namespace, {})
    in_namespace = pod.namespace == own_namespace if selector is None else _matches(selector, of_namespace)
    return in_namespace and _matches(peer.get("podSelector") or {}, pod.labels)


def _matches(selector: Document, labels: Mapping[str, str]) -> bool:
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_holds(one, labels.get(one["key"])) for one in selector.get("matchExpressions") or [])


def _holds(requirement: Document, value: str | None) -> bool:
    match requirement["operator"]:
        case "In":
            return value in requirement["values"]
        case "NotIn":
            return value not in requirement["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case unknown:
            raise ValueError(f"a label selector has the unknown operator {unknown}")


def _numbered(port: Document) -> Ports:
    first, last = _ALL_PORTS if port.get("port") is None else (port["port"], port.get("endPort") or port["port"])
    return Ports(port.get("protocol", "TCP").lower(), first, last)


def _resolved(named: Iterable[Document], pod: _Pod) -> tuple[Ports, ...]:
    keys = [(port.get("protocol", "TCP"), port["port"]) for port in named]
    return tuple(
        Ports(protocol.lower(), pod.named_ports[protocol, name], pod.named_ports[protocol, name])
        for protocol, name in keys
        if (protocol, name) in pod.named_ports
    )
