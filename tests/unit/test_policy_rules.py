"""What NetworkPolicies allow in the test cluster, case by case, as the Kubernetes API describes it."""

from __future__ import annotations

from typing import Any

import pytest

from tools.cluster.policy_rules import Flow, PodRules, Ports, pod_rules

NAMESPACES = [
    {"metadata": {"name": "team", "labels": {"kubernetes.io/metadata.name": "team", "kind": "tenant"}}},
    {"metadata": {"name": "other", "labels": {"kubernetes.io/metadata.name": "other"}}},
]
ANYONE = Flow(("0.0.0.0/0",))
WEB = Ports("tcp", 8080, 8080)


def pod(address: str, namespace: str = "team", *, ports: dict[str, int] | None = None, **labels: str) -> dict[str, Any]:
    listed = [{"name": name, "containerPort": number} for name, number in (ports or {}).items()]
    return {
        "metadata": {"name": f"pod-{address}", "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"name": "main", "ports": listed}]},
        "status": {"podIP": address, "phase": "Running"},
    }


A = pod("10.0.0.1", app="a", tier="front", ports={"web": 8080})
B = pod("10.0.0.2", app="b", ports={"web": 9090})
C = pod("10.0.0.3", "other", app="a")
PODS = [A, B, C]


def policy(selector: dict[str, Any], namespace: str = "team", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": namespace}, "spec": {"podSelector": selector, **spec}}


def rules_of_a(*policies: dict[str, Any]) -> PodRules:
    (found,) = [one for one in pod_rules(policies, PODS, NAMESPACES) if one.address == "10.0.0.1"]
    return found


def only_a(**spec: Any) -> PodRules:
    return rules_of_a(policy({"matchLabels": {"app": "a"}}, **spec))


def test_without_a_policy_nothing_is_ruled() -> None:
    assert pod_rules([], PODS, NAMESPACES) == []


def test_the_empty_selector_denies_every_pod_of_its_namespace_both_ways() -> None:
    denied = policy({}, policyTypes=["Ingress", "Egress"])
    assert pod_rules([denied], PODS, NAMESPACES) == [PodRules("10.0.0.1", (), ()), PodRules("10.0.0.2", (), ())]


@pytest.mark.parametrize(
    ("spec", "ingress", "egress"),
    [
        ({"policyTypes": ["Ingress"]}, (), None),
        ({"policyTypes": ["Egress"]}, None, ()),
        ({}, (), None),
        ({"egress": []}, (), ()),
        ({"policyTypes": ["Ingress"], "egress": [{}]}, (), None),
        ({"ingress": [{}]}, (ANYONE,), None),
        ({"policyTypes": ["Egress"], "egress": [{"to": [], "ports": []}]}, None, (ANYONE,)),
    ],
)
def test_directions(spec: dict[str, Any], ingress: Any, egress: Any) -> None:
    found = only_a(**spec)
    assert (found.ingress, found.egress) == (ingress, egress)


def test_policies_add_up_and_one_of_another_namespace_says_nothing() -> None:
    elsewhere = policy({}, "other", policyTypes=["Ingress", "Egress"])
    found = rules_of_a(
        elsewhere,
        policy({}, policyTypes=["Ingress"]),
        policy({}, ingress=[{"from": [{"podSelector": {"matchLabels": {"app": "b"}}}]}]),
    )
    assert found == PodRules("10.0.0.1", (Flow(("10.0.0.2",)),), None)


@pytest.mark.parametrize(
    ("peer", "addresses"),
    [
        ({"podSelector": {}}, ["10.0.0.1", "10.0.0.2"]),
        ({"podSelector": {"matchLabels": {"app": "a"}}}, ["10.0.0.1"]),
        ({"namespaceSelector": {}}, ["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "other"}}}, ["10.0.0.3"]),
        ({"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "a"}}}, ["10.0.0.1", "10.0.0.3"]),
        ({"namespaceSelector": {"matchLabels": {"kind": "tenant"}}, "podSelector": {"matchLabels": {"app": "a"}}}, ["10.0.0.1"]),
        ({"podSelector": {"matchLabels": {"app": "none"}}}, []),
        ({"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["b", "c"]}]}}, ["10.0.0.2"]),
        ({"podSelector": {"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["front"]}]}}, ["10.0.0.2"]),
        ({"podSelector": {"matchExpressions": [{"key": "tier", "operator": "Exists"}]}}, ["10.0.0.1"]),
        ({"podSelector": {"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}}, ["10.0.0.2"]),
    ],
)
def test_peers_by_label(peer: dict[str, Any], addresses: list[str]) -> None:
    expected = (Flow(tuple(addresses)),) if addresses else ()
    assert only_a(ingress=[{"from": [peer]}]).ingress == expected
    assert only_a(policyTypes=["Egress"], egress=[{"to": [peer]}]).egress == expected


def test_blocks_of_addresses_and_what_is_taken_out_of_them() -> None:
    to = [
        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.2.0.0/16"]}},
        {"ipBlock": {"cidr": "192.0.2.1/32"}},
        {"ipBlock": {"cidr": "::/0"}},
    ]
    assert only_a(egress=[{"to": to}]).egress == (
        Flow(("10.0.0.0/8",), excluded=("10.1.0.0/16", "10.2.0.0/16")),
        Flow(("192.0.2.1/32",)),
    )


@pytest.mark.parametrize(
    ("port", "expected"),
    [
        ({"port": 80}, Ports("tcp", 80, 80)),
        ({"protocol": "UDP", "port": 53}, Ports("udp", 53, 53)),
        ({"port": 8000, "endPort": 8010}, Ports("tcp", 8000, 8010)),
        ({"protocol": "SCTP"}, Ports("sctp", 1, 65535)),
        ({"port": "web"}, WEB),
    ],
)
def test_ports_of_the_pod_itself(port: dict[str, Any], expected: Ports) -> None:
    assert only_a(ingress=[{"ports": [port]}]).ingress == (Flow(("0.0.0.0/0",), (expected,)),)


def test_a_name_that_the_pod_gives_no_port_allows_nothing() -> None:
    assert only_a(ingress=[{"ports": [{"port": "metrics"}]}]).ingress == ()
    assert only_a(ingress=[{"ports": [{"protocol": "UDP", "port": "web"}]}]).ingress == ()


def test_a_name_in_egress_is_the_port_of_each_pod_that_is_called() -> None:
    rule = {"to": [{"podSelector": {}}], "ports": [{"port": "web"}, {"port": 1}]}
    assert only_a(policyTypes=["Egress"], egress=[rule]).egress == (
        Flow(("10.0.0.1", "10.0.0.2"), (Ports("tcp", 1, 1),)),
        Flow(("10.0.0.1",), (WEB,)),
        Flow(("10.0.0.2",), (Ports("tcp", 9090, 9090),)),
    )
    assert only_a(policyTypes=["Egress"], egress=[{"ports": [{"port": "web"}]}]).egress == (
        Flow(("10.0.0.1",), (WEB,)),
        Flow(("10.0.0.2",), (Ports("tcp", 9090, 9090),)),
    )


def test_pods_that_have_ended_or_use_the_nodes_network_are_no_peers() -> None:
    ended = pod("10.0.0.8")
    ended["status"]["phase"] = "Succeeded"
    of_node = pod("10.0.0.9")
    of_node["spec"]["hostNetwork"] = True
    without_address = pod("")
    found = pod_rules([policy({}, ingress=[{"from": [{"podSelector": {}}]}])], [A, ended, of_node, without_address], NAMESPACES)
    assert found == [PodRules("10.0.0.1", (Flow(("10.0.0.1",)),), None)]
