"""`finetune doctor`: the settings of the probe's pods, and what is printed."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks.cluster import NetworkProbe, OperatorDeployment, StorageClass, UnknownFact
from finetune_cli.cluster import read_facts as reading
from finetune_cli.commands import doctor
from finetune_job.api.profile import FineTuneProfileSpec

SEEN = NetworkProbe(ingress_denied=True, egress_denied=True, allowed_reached=True, node_denied=True, resolved=True)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[FineTuneProfileSpec]:
    """A healthy cluster with no profile but that of the test; the profiles with which the network was probed."""
    profiles: list[FineTuneProfileSpec] = []

    def probe(_client: object, _namespace: str, profile: FineTuneProfileSpec, *_: object) -> NetworkProbe:
        profiles.append(profile)
        return SEEN

    answers: dict[str, Any] = {
        "_served": ["finetunejobs", "finetuneprofiles"],
        "_operators": [OperatorDeployment("system", "ours", 1)],
        "_may_create_jobs": True,
        "_storage_classes": [StorageClass("shared", True)],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(reading, name, lambda *_, answer=answer: answer)

    class Client:
        def __init__(self, _context: str | None) -> None: ...

        def request(self, *_: object) -> dict[str, Any]:
            return {"gitVersion": "v1.36.3"}

    monkeypatch.setattr(doctor, "ClusterClient", Client)
    monkeypatch.setattr(doctor, "probe_network", probe)
    monkeypatch.setattr(reading, "_profile", lambda *_: FineTuneProfileSpec(trainer_image="trainer:1", run_as_user=7))
    return profiles


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", "--namespace", "team", *arguments])
    return result.exit_code, result.output


def test_the_pods_run_as_the_profile_says(probed: list[FineTuneProfileSpec]) -> None:
    code, printed = run()
    assert code == 0
    assert [one.trainer_image for one in probed] == ["trainer:1"]
    assert "passed   network-policies: the cluster's network enforces NetworkPolicies in both directions\n" in printed
    assert "fix" not in printed


def test_without_a_profile_the_network_is_not_probed(probed: list[FineTuneProfileSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_profile", lambda *_: UnknownFact("403"))
    code, printed = run("--output", "json")
    document = json.loads(printed)
    assert (code, document["healthy"], probed) == (3, False, [])
    (check,) = [one for one in document["checks"] if one["id"] == "network-policies"]
    assert check["outcome"] == "unknown"
    assert check["message"] == "the network probe runs the image of the profile, which could not be read"


def test_what_fails_comes_with_its_fix(probed: list[FineTuneProfileSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_storage_classes", lambda *_: [])
    code, printed = run("--no-probe")
    assert (code, probed) == (1, [])
    assert "failed   storage-class: the cluster has no default storage class" in printed
    assert "    fix:    set storageClassName of the profile" in printed
    assert "network-policies" not in printed


def test_without_a_kubeconfig_nothing_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    code, printed = run()
    assert code == 2
    assert "no usable kubeconfig" in printed
