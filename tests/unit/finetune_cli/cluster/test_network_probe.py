"""The two pods of the network probe: what they run, what is made of their status, and that nothing of them is left."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_cli.checks.cluster import NetworkProbe, UnknownFact
from finetune_cli.cluster import network_probe, probe_objects
from finetune_cli.cluster.client import RequestError
from finetune_cli.cluster.network_probe import probe_network
from finetune_cli.exit_codes import LocalError
from finetune_cli.local.launch import Interruption
from finetune_job.api.profile import FineTuneProfileSpec

PROFILE = FineTuneProfileSpec.model_validate(
    {
        "trainerImage": "registry.example/trainer:1",
        "runAsUser": 1000,
        "imagePullSecrets": [{"name": "pull"}],
        "pods": {"preflight": {"tolerations": [{"key": "cpu", "operator": "Exists"}]}},
        "network": {"dns": {"namespaces": ["dns"], "cidrs": []}},
    }
)
RUNNING = {"state": {"running": {}}}
LISTENING = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [RUNNING]}


def ended(container: str, message: str) -> dict[str, Any]:
    return {"name": container, "state": {"terminated": {"exitCode": 0, "message": message}}}


def asked(before: str, under: str | None = None) -> list[dict[str, Any]]:
    """Status of the asker, look by look."""
    first = {"phase": "Pending", "initContainerStatuses": [ended("before", before)]}
    if under is None:
        return [first]
    return [first, {**first, "phase": "Succeeded", "containerStatuses": [ended("under", under)]}]


class Cluster:
    """Answers with what it was given; the last status of a pod stays."""

    def __init__(self, listener: list[dict[str, Any]], asker: list[dict[str, Any]]) -> None:
        self.statuses = {"listener": listener, "asker": asker}
        self.made: dict[str, dict[str, Any]] = {}
        self.ever: list[dict[str, Any]] = []
        self.undeletable = False

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if method == "POST":
            assert body is not None
            self.made[f"{path}/{body['metadata']['name']}"] = body
            self.ever.append(body)
        elif method == "DELETE":
            if self.undeletable:
                raise RequestError("the API server answered 403", 403)
            if self.made.pop(path, None) is None:
                raise RequestError("the API server answered 404", 404)
        else:
            statuses = self.statuses[path.rpartition("-")[2]]
            return {"status": statuses.pop(0) if len(statuses) > 1 else statuses[0]}
        return {}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_probe, "_POLL_SECONDS", 0.0)


def probed(cluster: Cluster, seconds: int = 60) -> NetworkProbe | UnknownFact:
    return probe_network(cluster, "team", PROFILE, seconds, Interruption())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("under", "expected"),
    [
        (
            "[true, false, false, false, true]",
            NetworkProbe(
                True, True, ingress_denied=True, egress_denied=True, allowed_reached=True, node_denied=True, resolved=True
            ),
        ),
        ("[true, true, true, true, true]", NetworkProbe(True, True, allowed_reached=True, resolved=True)),
        ("[false, false, true, true, false]", NetworkProbe(True, True, ingress_denied=True)),
        ("[false, true, false, true, false]", NetworkProbe(True, True, egress_denied=True)),
        ("[false, true, true, false, false]", NetworkProbe(True, True, node_denied=True)),
    ],
)
def test_what_the_pods_saw(under: str, expected: NetworkProbe) -> None:
    cluster = Cluster([{"phase": "Pending"}, LISTENING], asked("[true, true, true, true, true]", under))
    assert probed(cluster) == expected
    assert cluster.made == {}
    assert [one["kind"] for one in cluster.ever] == ["Pod", "Pod", "NetworkPolicy", "NetworkPolicy"]


def test_pods_that_do_not_reach_each_other_get_no_policy() -> None:
    cluster = Cluster([LISTENING], asked("[true, false, true, false, true]"))
    assert probed(cluster) == NetworkProbe(reached_before=False, resolved_before=True)
    assert [one["kind"] for one in cluster.ever] == ["Pod", "Pod"]
    assert cluster.made == {}


@pytest.mark.parametrize(
    ("listener", "asker", "reason"),
    [
        (
            [
                {
                    "phase": "Pending",
                    "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "no such"}}}],
                }
            ],
            [{}],
            "not done after 0 s: ErrImagePull: no such",
        ),
        (
            [{"phase": "Pending", "conditions": [{"status": "False", "reason": "Unschedulable", "message": "no node"}]}],
            [{}],
            "Unschedulable: no node",
        ),
        ([{"phase": "Failed", "reason": "DeadlineExceeded"}], [{}], "listener ended early: DeadlineExceeded"),
        ([LISTENING], asked("not JSON"), "no report"),
        ([LISTENING], asked("[true, true]"), "no report"),
        ([LISTENING], asked('[true, true, true, true, "yes"]'), "no report"),
        ([LISTENING], [{"phase": "Failed"}], "its phase is Failed"),
    ],
)
def test_a_probe_that_fails_says_why_and_leaves_nothing(
    listener: list[dict[str, Any]], asker: list[dict[str, Any]], reason: str
) -> None:
    cluster = Cluster(listener, asker)
    found = probed(cluster, seconds=0)
    assert isinstance(found, UnknownFact)
    assert reason in found.reason
    assert cluster.ever
    assert cluster.made == {}


def test_an_interrupted_probe_leaves_nothing() -> None:
    class Interrupted(Interruption):
        requested = True

    cluster = Cluster([LISTENING], [{}])
    with pytest.raises(LocalError) as caught:
        probe_network(cluster, "team", PROFILE, 60, Interrupted())  # type: ignore[arg-type]
    assert caught.value.exit_code == 130
    assert cluster.ever
    assert cluster.made == {}


def test_what_cannot_be_deleted_is_named() -> None:
    cluster = Cluster([LISTENING], asked("[false, false, false, false, false]"))
    cluster.undeletable = True
    with pytest.raises(
        LocalError, match=r"/api/v1/namespaces/team/pods/finetune-doctor-\w{8}-listener \(the API server"
    ) as caught:
        probed(cluster)
    assert caught.value.exit_code == 3


def test_the_pods_are_restricted_and_run_where_preflight_does() -> None:
    pod = probe_objects.asker("1234", PROFILE, 90, "10.0.0.1")
    spec = pod["spec"]
    assert spec["activeDeadlineSeconds"] == 90
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, "runAsUser": 1000}
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert spec["tolerations"] == [{"key": "cpu", "operator": "Exists"}]
    containers = [*spec["initContainers"], *spec["containers"]]
    assert [one["name"] for one in containers] == ["before", "under"]
    for one in containers:
        assert one["image"] == "registry.example/trainer:1"
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert one["securityContext"]["readOnlyRootFilesystem"] is True


def test_each_policy_denies_one_port_and_names_are_asked_where_the_profile_says() -> None:
    of_listener, of_asker = probe_objects.policies("1234", PROFILE)
    asker, listener = ({"matchLabels": {"finetune.dev/doctor": f"1234-{part}"}} for part in ("asker", "listener"))

    def tcp(*ports: int) -> list[dict[str, Any]]:
        return [{"protocol": "TCP", "port": port} for port in ports]

    assert of_listener["spec"] == {
        "podSelector": listener,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": asker}], "ports": tcp(29401, 29403)}],
    }
    assert of_asker["spec"] == {
        "podSelector": asker,
        "policyTypes": ["Egress"],
        "egress": [
            {"to": [{"podSelector": listener}], "ports": tcp(29401, 29402)},
            {
                "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "dns"}}}],
                "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
            },
        ],
    }


@pytest.fixture
def free_ports() -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return [str(each.getsockname()[1]) for each in (one, two)]


@pytest.fixture
def listening(free_ports: list[str]) -> Iterator[str]:
    """The listener's program on one port of this machine."""
    with subprocess.Popen([sys.executable, "-c", probe_objects.LISTEN, free_ports[0]]) as process:
        yield free_ports[0]
        process.kill()


@pytest.mark.parametrize(("name", "resolves"), [("localhost", True), ("no-such-name.invalid", False)])
def test_the_asker_reports_what_it_reaches(
    listening: str, free_ports: list[str], tmp_path: Path, name: str, resolves: bool
) -> None:
    report = tmp_path / "report"
    expected = [True, False, resolves]
    # None: whatever it is.
    wanted = json.dumps([True, None, resolves])
    arguments = [str(report), "20", name, wanted, f"127.0.0.1 {listening}", f"127.0.0.1 {free_ports[1]}"]
    subprocess.run([sys.executable, "-c", probe_objects.ASK, *arguments], check=True, timeout=60)
    assert json.loads(report.read_text()) == expected
