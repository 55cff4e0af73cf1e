"""The two pods of the network probe: what they run, what is made of their status, and that nothing of them is left."""

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
from tests.support.cases import table

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


def ended(message: str) -> list[dict[str, Any]]:
    """Status of the asker, look by look."""
    state = {"terminated": {"exitCode": 0, "message": message}}
    return [{"phase": "Pending"}, {"phase": "Succeeded", "containerStatuses": [{"name": "asker", "state": state}]}]


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


@pytest.mark.parametrize(("seen", "expected"), table(__file__, "test_what_the_pods_saw"))
def test_what_the_pods_saw(seen: str, expected: list[bool]) -> None:
    cluster = Cluster([{"phase": "Pending"}, LISTENING], ended(seen))
    assert probed(cluster) == NetworkProbe(*expected)
    assert cluster.made == {}
    assert [one["kind"] for one in cluster.ever] == ["Pod", "NetworkPolicy", "NetworkPolicy", "Pod"], (
        "no pod asks without policies"
    )


@pytest.mark.parametrize(("listener", "asker", "reason"), table(__file__, "test_a_probe_that_fails_says_why_and_leaves_nothing"))
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
    cluster = Cluster([LISTENING], ended("[false, false, false, false, false]"))
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
    (container,) = spec["containers"]
    assert (container["name"], container["image"]) == ("asker", "registry.example/trainer:1")
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


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
    arguments = [str(report), "200", name, json.dumps(expected), f"127.0.0.1 {listening}", f"127.0.0.1 {free_ports[1]}"]
    subprocess.run([sys.executable, "-c", probe_objects.ASK, *arguments], check=True, timeout=300)
    assert json.loads(report.read_text()) == expected
