"""What the operator is told on its command line."""

from __future__ import annotations

import pytest

from finetune_operator.settings import parse_settings


def test_defaults_come_from_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAMESPACE", "finetune-system")
    monkeypatch.setenv("POD_NAME", "operator-0")
    settings = parse_settings([])
    assert (settings.namespaces, settings.log_level, settings.listen_port) == ((), "info", 8080)
    assert (settings.lease_namespace, settings.lease_name, settings.identity) == (
        "finetune-system",
        "finetune-operator",
        "operator-0",
    )
    assert settings.claim_namespace == "kube-system"


def test_processes_without_a_pod_name_have_identities_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POD_NAME", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    monkeypatch.setattr("os.getpid", lambda: 7)
    assert parse_settings([]).identity == "host-7"


def test_namespaces_are_sorted_and_none_counts_twice() -> None:
    given = ["--namespace", "b", "--namespace", "a", "--namespace", "b"]
    assert parse_settings(given).namespaces == ("a", "b")


@pytest.mark.parametrize("given", [["--listen-port", "http"], ["--log-level", "loud"], ["--unknown"]])
def test_malformed_arguments_end_with_a_usage_message(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_settings(given)
    assert raised.value.code == 2
    assert "usage: python -m finetune_operator" in capsys.readouterr().err
