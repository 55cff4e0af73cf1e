import asyncio
import json
from pathlib import Path

import pytest

from finetune_operator.client.access import load_configuration, proxy_from_environment

PROXY = "http://proxy.example:3128"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_proxy_is_the_one_that_the_environment_names_for_this_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_from_environment("https://api.example:6443") is None
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    assert proxy_from_environment("https://api.example:6443") == PROXY
    assert proxy_from_environment("http://api.example") is None
    monkeypatch.setenv("NO_PROXY", "example.org,.example")
    assert proxy_from_environment("https://api.example:6443") is None


def test_client_asks_the_environment_once_and_not_for_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"name": "c", "cluster": {"server": "https://api.example:6443"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    user = {"name": "u", "user": {"token": "t"}}
    content = {"apiVersion": "v1", "kind": "Config", "current-context": "x", "clusters": [cluster], "contexts": [context]}
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps({**content, "users": [user]}))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    configuration = asyncio.run(load_configuration())
    assert configuration.proxy == PROXY
    assert configuration.client_session_kwargs == {"trust_env": False}
