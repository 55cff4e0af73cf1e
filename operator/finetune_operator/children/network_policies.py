"""NetworkPolicies of a run: what its pods may reach, and what may reach them. The cluster's network plugin must enforce them.

One policy is for all pods of the run: they may reach each other and DNS servers, and only the operator and the namespaces that
the profile names may read rank 0's metrics. The other policy is for the pods that need addresses outside the cluster (fetch,
publish): they may reach public addresses and those that the profile names, but neither the cluster nor link-local addresses,
where cloud metadata is served. Policies are additive, so the second one only permits more.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from finetune_job.api.profile import DnsServers, NetworkSettings
from finetune_job.names import LABEL_JOB_UID, LABEL_ROLE, OBSERVE_PORT, Role, network_policy_name
from finetune_job.plan.launch_plan import LaunchPlan
from finetune_operator.children.frozen_run import Owner, metadata

_NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Label that the API server itself sets on every namespace, so that no tenant can forge it."""
_NOT_PUBLIC = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
    *("192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4"),
)
_NAT64 = ipaddress.IPv6Address("64:ff9b::")
"""Prefix under which IPv6-only pods reach IPv4 addresses (RFC 6052): the last 32 bits are the IPv4 address."""
_NOT_PUBLIC_6 = (
    *("::1/128", "fc00::/7", "fe80::/10", "ff00::/8"),
    *(f"{_NAT64 + int(net.network_address)}/{96 + net.prefixlen}" for net in map(ipaddress.IPv4Network, _NOT_PUBLIC)),
)
"""Ranges of RFC 1918, 3927, 4193, 4291, 6598 and 6890: clusters, nodes, metadata services, and addresses that are not routed."""


def network_policies(owner: Owner, plan: LaunchPlan, network: NetworkSettings, operator_namespace: str) -> list[dict[str, Any]]:
    """Build the policies of a run, to be created before its first pod; none if the profile does not isolate runs."""
    if not network.isolate:
        return []
    ours = {"podSelector": {"matchLabels": {LABEL_JOB_UID: owner.uid}}}
    readers = [_namespace(name) for name in dict.fromkeys((operator_namespace, *network.metrics_namespaces))]
    policies = [
        _policy(
            network_policy_name(owner.name),
            owner,
            ours["podSelector"],
            ingress=[{"from": [ours]}, {"from": readers, "ports": [{"protocol": "TCP", "port": OBSERVE_PORT}]}],
            egress=[{"to": [ours]}, dns_rule(network.dns)],
        )
    ]
    if plan.fetch is not None or plan.publish is not None:
        selector = {
            "matchLabels": {LABEL_JOB_UID: owner.uid},
            "matchExpressions": [{"key": LABEL_ROLE, "operator": "In", "values": [Role.FETCH.value, Role.PUBLISH.value]}],
        }
        public = [
            {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(_NOT_PUBLIC)}},
            {"ipBlock": {"cidr": "::/0", "except": list(_NOT_PUBLIC_6)}},
        ]
        named = [
            {
                "to": [{"ipBlock": {"cidr": destination.cidr}}],
                **({"ports": [{"protocol": "TCP", "port": port} for port in destination.ports]} if destination.ports else {}),
            }
            for destination in network.destinations
        ]
        name = network_policy_name(owner.name, ways_out=True)
        policies.append(_policy(name, owner, selector, ingress=[], egress=[{"to": public}, *named]))
    return policies


def dns_rule(dns: DnsServers) -> dict[str, Any]:
    """Build the egress rule that lets all pods of a run reach DNS servers."""
    servers = [*map(_namespace, dns.namespaces), *({"ipBlock": {"cidr": cidr}} for cidr in dns.cidrs)]
    ports = [{"protocol": protocol, "port": port} for port in dns.ports for protocol in ("UDP", "TCP")]
    return {**({"to": servers} if servers else {}), "ports": ports}


def _namespace(name: str) -> dict[str, Any]:
    """Build the peer that matches all pods of a namespace."""
    return {"namespaceSelector": {"matchLabels": {_NAMESPACE_LABEL: name}}}


def _policy(
    name: str, owner: Owner, selector: dict[str, Any], *, ingress: list[dict[str, Any]], egress: list[dict[str, Any]]
) -> dict[str, Any]:
    spec = {"podSelector": selector, "policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata(owner, name), "spec": spec}
