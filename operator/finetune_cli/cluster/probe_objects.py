"""The two pods of the network probe and their NetworkPolicies, as documents.

The listener accepts connections on three ports. The asker's first container tries them and its own node without any policy; its
second one tries them until it sees what the policies demand. Each leaves what it saw in its termination message, so no right to
logs is needed.
"""

from __future__ import annotations

from typing import Any

from finetune_job.api.job import RunSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.names import TERMINATION_LOG, Role
from finetune_job.plan.resolve import placement_of
from finetune_operator.children.network_policies import dns_rule
from finetune_operator.children.placement import apply_placement
from finetune_operator.children.pod_template import container_security_context, pod_security_context

LABEL = "finetune.dev/doctor"
BOTH, INGRESS_DENIED, EGRESS_DENIED = 29401, 29402, 29403
"""Ports: allowed by both policies, not let in by the listener's, not let out by the asker's."""
BEFORE, UNDER = "before", "under"
"""Names of the asker's containers."""
SETTLE_SECONDS = 40
"""How long the asker waits for what it should see; a network plugin takes up a policy within seconds."""
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
wanted = json.loads(wanted)
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
    if time.monotonic() > end or all(want in (None, see) for want, see in zip(wanted, seen)):
        break
    time.sleep(0.5)
with open(report, "w") as file:
    json.dump(seen, file)
"""


def probe_name(suffix: str, part: str) -> str:
    """Name of an object of one probe."""
    return f"finetune-doctor-{suffix}-{part}"


def listener(suffix: str, profile: FineTuneProfileSpec, seconds: int) -> dict[str, Any]:
    """The pod that is asked."""
    arguments = ["-c", LISTEN, *map(str, (BOTH, INGRESS_DENIED, EGRESS_DENIED))]
    return _pod(suffix, "listener", profile, seconds, {"listen": arguments})


def asker(suffix: str, profile: FineTuneProfileSpec, seconds: int, address: str) -> dict[str, Any]:
    """The pod that asks the other one at this address."""
    targets = [*(f"{address} {port}" for port in (BOTH, INGRESS_DENIED, EGRESS_DENIED)), f"$(NODE) {_KUBELET_PORT}"]

    def arguments(wanted: str) -> list[str]:
        return ["-c", ASK, TERMINATION_LOG, str(SETTLE_SECONDS), _NAME, wanted, *targets]

    # Whether a node may be reached at all is not ours to say.
    containers = {BEFORE: arguments("[true, true, true, null, true]"), UNDER: arguments("[true, false, false, false, true]")}
    return _pod(suffix, "asker", profile, seconds, containers)


def policies(suffix: str, profile: FineTuneProfileSpec) -> list[dict[str, Any]]:
    """The two policies, one for each pod."""
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


def _pod(suffix: str, part: str, profile: FineTuneProfileSpec, seconds: int, arguments: dict[str, list[str]]) -> dict[str, Any]:
    """A pod where preflight pods run; the containers run one after another."""
    placement = placement_of("doctor", profile, RunSpec())
    amounts = {"cpu": "100m", "memory": "128Mi"}
    *first, last = (
        {
            "name": name,
            "image": profile.trainer_image,
            "imagePullPolicy": profile.image_pull_policy,
            "command": ["python", *each],
            "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}],
            "resources": {"requests": dict(amounts), "limits": dict(amounts)},
            "securityContext": container_security_context(),
            "terminationMessagePath": TERMINATION_LOG,
        }
        for name, each in arguments.items()
    )
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        # Also if nobody is left to delete it.
        "activeDeadlineSeconds": seconds,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": placement.service_account_name,
        "securityContext": pod_security_context(placement),
        "initContainers": first,
        "containers": [last],
    }
    metadata = {"name": probe_name(suffix, part), "labels": {LABEL: f"{suffix}-{part}"}}
    template = {"metadata": metadata, "spec": spec}
    apply_placement(template, placement, Role.PREFLIGHT)
    return {"apiVersion": "v1", "kind": "Pod", **template}
