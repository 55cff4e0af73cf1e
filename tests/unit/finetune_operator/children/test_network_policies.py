"""Whom a run's pods may reach: the policies, and that they are there before the first pod."""

import ipaddress
from pathlib import Path
from typing import Any

import pytest

from finetune_job.api.profile import NetworkSettings
from finetune_operator.children.network_policies import network_policies
from finetune_operator.decide.reconcile import reconcile
from tests.support.builders import T0, UID, JobBuilder, a_job, observing
from tests.support.cases import table
from tests.unit.finetune_operator.children.building import run_of
from tests.unit.finetune_operator.decide.reading import created

SAME_RUN = {"podSelector": {"matchLabels": {"finetune.dev/job-uid": UID}}}


def policies(job: JobBuilder | None = None, **network: Any) -> list[dict[str, Any]]:
    run = run_of(job or a_job())
    return network_policies(run.owner, run.plan, NetworkSettings.model_validate(network), "finetune-system")


def from_the_hub() -> JobBuilder:
    return a_job().spec("model", {"source": "hf://org/model", "revision": "0" * 40})


def test_the_pods_of_a_run_talk_among_themselves_and_to_the_operator() -> None:
    (policy,) = policies(metricsNamespaces=["monitoring", "finetune-system"])
    assert policy["metadata"]["name"] == "tune-run"
    assert policy["metadata"]["ownerReferences"][0]["uid"] == UID
    readers = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
        for name in ("finetune-system", "monitoring")
    ]
    assert policy["spec"] == {
        "podSelector": SAME_RUN["podSelector"],
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [SAME_RUN]}, {"from": readers, "ports": [{"protocol": "TCP", "port": 9400}]}],
        "egress": [
            {"to": [SAME_RUN]},
            {
                "to": [
                    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}},
                    {"ipBlock": {"cidr": "169.254.20.10/32"}},
                ],
                "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
            },
        ],
    }


@pytest.mark.parametrize(("dns", "questions"), table(__file__, "test_a_profile_names_the_dns_servers"))
def test_a_profile_names_the_dns_servers(dns: dict[str, Any], questions: dict[str, Any]) -> None:
    (policy,) = policies(dns=dns)
    assert policy["spec"]["egress"] == [{"to": [SAME_RUN]}, questions]


def test_only_fetch_and_publish_have_a_way_out() -> None:
    _, out = policies(from_the_hub(), destinations=[{"cidr": "10.1.2.0/24", "ports": [443, 5000]}, {"cidr": "10.9.0.0/16"}])
    assert out["metadata"]["name"] == "tune-ways-out"
    assert out["spec"]["podSelector"] == {
        "matchLabels": {"finetune.dev/job-uid": UID},
        "matchExpressions": [{"key": "finetune.dev/role", "operator": "In", "values": ["fetch", "publish"]}],
    }
    assert out["spec"]["ingress"] == []
    assert out["spec"]["egress"][1:] == [
        {
            "to": [{"ipBlock": {"cidr": "10.1.2.0/24"}}],
            "ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 5000}],
        },
        {"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]},
    ]
    assert len(policies(a_job().spec("output", {"destination": "s3://bucket/model"}))) == 2
    assert len(policies()) == 1


@pytest.mark.parametrize(("address", "is_reached"), table(__file__, "test_a_way_out_leads_to_public_addresses_alone"))
def test_a_way_out_leads_to_public_addresses_alone(address: str, is_reached: bool) -> None:
    found = ipaddress.ip_address(address)
    _, out = policies(from_the_hub())
    (rule,) = out["spec"]["egress"]
    blocks = [peer["ipBlock"] for peer in rule["to"]]

    def holds(block: str) -> bool:
        network = ipaddress.ip_network(block)
        return network.version == found.version and found in network

    assert any(holds(one["cidr"]) and not any(map(holds, one["except"])) for one in blocks) is is_reached


PAGE = Path(__file__).parents[4] / "docs/reference/network.md"
WORDS = {
    "the run": {"podSelector"},
    "DNS servers": {"namespace kube-system", "block 169.254.20.10/32"},
    "public addresses": {"block 0.0.0.0/0", "block ::/0"},
    "`network.destinations`": {"block 10.1.2.0/24"},
    "metrics readers": {"namespace finetune-system", "namespace monitoring"},
}
"""The page's words for peers of the policies."""


def named(peer: dict[str, Any]) -> str:
    match peer:
        case {"podSelector": _}:
            return "podSelector"
        case {"namespaceSelector": {"matchLabels": labels}}:
            return f"namespace {labels['kubernetes.io/metadata.name']}"
    return f"block {peer['ipBlock']['cidr']}"


@pytest.mark.parametrize("role", ["fetch", "preflight", "train", "merge", "publish"])
def test_the_page_says_what_the_pods_of_a_role_reach(role: str) -> None:
    cells = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith(f"| {role} |")]
    ((_, _, reach, reached_by, _),) = cells
    made = policies(from_the_hub(), destinations=[{"cidr": "10.1.2.0/24"}], metricsNamespaces=["monitoring"])
    of_role = [
        one["spec"]
        for one in made
        if all(role in need["values"] for need in one["spec"]["podSelector"].get("matchExpressions", []))
    ]
    for direction, side, cell in (("egress", "to", reach), ("ingress", "from", reached_by)):
        peers = {named(peer) for spec in of_role for rule in spec[direction] for peer in rule[side]}
        assert peers == set().union(*(WORDS[word.strip()] for word in cell.split(",")))


def test_a_profile_may_leave_runs_open() -> None:
    assert policies(from_the_hub(), isolate=False) == []


def test_the_policies_are_there_before_the_first_pod() -> None:
    job = from_the_hub()
    actions = reconcile(observing(job).frozen().build(), T0)
    assert created(actions) == [
        "NetworkPolicy/tune-run",
        "NetworkPolicy/tune-ways-out",
        "ConfigMap/tune-plan",
        "Job/tune-fetch-0",
    ]
    open_job = job.with_profile(network={"isolate": False})
    assert created(reconcile(observing(open_job).frozen().build(), T0)) == ["ConfigMap/tune-plan", "Job/tune-fetch-0"]
