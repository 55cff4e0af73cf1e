"""What the operator is told on its command line."""

from pathlib import Path

import pytest

from finetune_operator.settings import Rates, parse_settings


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


def test_processes_without_a_pod_name_have_identities_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POD_NAME", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    monkeypatch.setattr("os.getpid", lambda: 7)
    assert parse_settings([]).identity == "host-7"


def test_namespaces_are_sorted_and_none_counts_twice() -> None:
    given = ["--namespace", "b", "--namespace", "a", "--namespace", "b"]
    assert parse_settings(given).namespaces == ("a", "b")


def test_rates_are_given_or_usual() -> None:
    assert parse_settings([]).rates == Rates(32, 50, 5.0, 20.0)
    given = ["--workers=4", "--requests-in-flight=8", "--progress-seconds=30", "--progress-writes-per-second=2"]
    assert parse_settings(given).rates == Rates(4, 8, 30.0, 2.0)


def test_tokens_are_asked_for_by_tls_alone() -> None:
    settings = parse_settings(["--metrics-authentication", "--tls=/etc/metrics-tls"])
    assert (settings.metrics_authentication, settings.tls_directory) == (True, Path("/etc/metrics-tls"))
    assert (parse_settings([]).metrics_authentication, parse_settings([]).tls_directory) == (False, None)


@pytest.mark.parametrize(
    "given",
    [
        ["--listen-port", "http"],
        ["--log-level", "loud"],
        ["--unknown"],
        ["--workers=0"],
        ["--workers=49"],
        ["--requests-in-flight=1001"],
        ["--progress-seconds=0.5"],
        ["--progress-writes-per-second=nan"],
        ["--metrics-authentication"],
    ],
)
def test_malformed_arguments_end_with_a_usage_message(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_settings(given)
    assert raised.value.code == 2
    assert "usage: python -m finetune_operator" in capsys.readouterr().err
