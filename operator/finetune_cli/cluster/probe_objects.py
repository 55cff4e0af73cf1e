"""The two pods of the network probe and their NetworkPolicies, as documents.

The listener accepts connections on three ports. The asker tries these ports, its own node and a name until the results
match the policies or time is up. It writes them to its termination message, so no permission to read logs is needed.
"""

from __future__ import annotations

from typing import Any

from finetune_cli.cluster.short_lived_pod import pod_document
from finetune_job.api.job import RunSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.names import TERMINATION_LOG, Role
from finetune_job.plan.resolve import placement_of
from finetune_operator.children.network_policies import dns_rule

LABEL = "finetune.dev/doctor"
BOTH, INGRESS_DENIED, EGRESS_DENIED = 29401, 29402, 29403
"""Ports: one that both policies allow, one that the listener's policy denies, and one that the asker's policy denies."""
SETTLE_SECONDS = 40
"""How long the asker waits for the expected result; a network plugin applies a policy within seconds."""
_NAME = "kubernetes.default.svc"
_KUBELET_PORT = 10250

LISTEN = """
import select, socket, sys
both = socket.has_dualstack_ipv6()
family = socket.AF_INET6 if both else socket.AF_INET
servers = [socket.create_server(("", int(port)), family=family, dualstack_ipv6=both) for port in sys.argv[1:]]
while True:
    for server in select.select(servers, [], [])[0]:
        server.accept()[0].close()
"""
ASK = """
import json, socket, sys, time
report, seconds, name, wanted, *targets = sys.argv[1:]
def reached(target):
    address, port = target.split()
    try:
        socket.create_connection((address, int(port)), timeout=1).close()
    except OSError:
        return False
    return True
def resolved():
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True
end = time.monotonic() + float(seconds)
while True:
    seen = [*map(reached, targets), resolved()]
    if time.monotonic() > end or seen == json.loads(wanted):
        break
    time.sleep(0.5)
with open(report, "w") as file:
    json.dump(seen, file)
"""


def probe_name(suffix: str, part: str) -> str:
    """Return the name of an object of a probe."""
    return f"finetune-doctor-{suffix}-{part}"


def listener(suffix: str, profile: FineTuneProfileSpec, seconds: int) -> dict[str, Any]:
    """Return the pod that listens."""
    arguments = ["-c", LISTEN, *map(str, (BOTH, INGRESS_DENIED, EGRESS_DENIED))]
    return _pod(suffix, "listener", profile, seconds, arguments)


def asker(suffix: str, profile: FineTuneProfileSpec, seconds: int, address: str) -> dict[str, Any]:
    """Return the pod that connects to the listener at `address`."""
    targets = [*(f"{address} {port}" for port in (BOTH, INGRESS_DENIED, EGRESS_DENIED)), f"$(NODE) {_KUBELET_PORT}"]
    wanted = "[true, false, false, false, true]"
    return _pod(suffix, "asker", profile, seconds, ["-c", ASK, TERMINATION_LOG, str(SETTLE_SECONDS), _NAME, wanted, *targets])


def policies(suffix: str, profile: FineTuneProfileSpec) -> list[dict[str, Any]]:
    """Return the two policies, one for each pod."""
    to_listener = {"to": [{"podSelector": _labels(suffix, "listener")}], "ports": _ports(BOTH, INGRESS_DENIED)}
    from_asker = {"from": [{"podSelector": _labels(suffix, "asker")}], "ports": _ports(BOTH, EGRESS_DENIED)}
    return [
        _policy(suffix, "listener", {"policyTypes": ["Ingress"], "ingress": [from_asker]}),
        _policy(suffix, "asker", {"policyTypes": ["Egress"], "egress": [to_listener, dns_rule(profile.network.dns)]}),
    ]


def _labels(suffix: str, part: str) -> dict[str, Any]:
    return {"matchLabels": {LABEL: f"{suffix}-{part}"}}


def _ports(*numbers: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": number} for number in numbers]


def _policy(suffix: str, part: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": probe_name(suffix, part)}
    spec = {"podSelector": _labels(suffix, part), **spec}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}


def _pod(suffix: str, part: str, profile: FineTuneProfileSpec, seconds: int, arguments: list[str]) -> dict[str, Any]:
    """Return a pod that runs Python with these arguments and is placed like a preflight pod."""
    node = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
    container = {"name": part, "command": ["python", *arguments], "env": [node], "terminationMessagePath": TERMINATION_LOG}
    placement = placement_of("doctor", profile, RunSpec())
    metadata = {"name": probe_name(suffix, part), "labels": {LABEL: f"{suffix}-{part}"}}
    return pod_document(metadata, placement, Role.PREFLIGHT, container, seconds=seconds, memory="128Mi")
