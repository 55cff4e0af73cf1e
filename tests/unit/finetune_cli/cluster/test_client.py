"""Requests to a cluster: what is sent, and what is made of answers that are none."""

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_cli.checks.cluster import UnknownFact
from finetune_cli.cluster.client import ClusterClient, RequestError
from finetune_cli.cluster.read_facts import read_facts
from finetune_cli.exit_codes import LocalError
from finetune_job.api.profile import FineTuneProfileSpec
from tests.support.cases import table

ANSWERS: dict[str, tuple[int, str]] = {}


class Handler(http.server.BaseHTTPRequestHandler):
    """Gives the answers of the test, and 404 to everything else."""

    def do_POST(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        assert self.headers["Authorization"] == "Bearer secret"
        status, text = ANSWERS.get(self.path, (404, '{"message": "no such path"}'))
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


def client_of(port: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterClient:
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {"token": "secret"}}],
    }
    path = directory / "kubeconfig"
    path.write_text(json.dumps(config))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    return ClusterClient()


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterClient]:
    ANSWERS.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield client_of(server.server_port, tmp_path, monkeypatch)
        server.shutdown()


@pytest.mark.parametrize(("status", "text", "message"), table(__file__, "test_an_answer_that_is_none_is_an_error"))
def test_an_answer_that_is_none_is_an_error(client: ClusterClient, status: int, text: str, message: str) -> None:
    ANSWERS["/version"] = (status, text)
    with pytest.raises(RequestError, match=message) as caught:
        client.request("GET", "/version")
    assert caught.value.status == status


def test_a_server_that_is_gone_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    begin = time.monotonic()
    with pytest.raises(RequestError, match="did not answer") as caught:
        client_of(port, tmp_path, monkeypatch).request("GET", "/version")
    assert caught.value.status is None
    assert time.monotonic() - begin < 30


def test_an_unknown_context_is_refused(client: ClusterClient) -> None:
    with pytest.raises(LocalError, match="no usable kubeconfig"):
        ClusterClient("elsewhere")


def test_without_a_kubeconfig_the_way_to_local_runs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "absent"))
    with pytest.raises(LocalError) as caught:
        ClusterClient()
    assert str(caught.value) == (
        "no usable kubeconfig: Invalid kube-config file. No configuration found; set KUBECONFIG, or name another --context; for "
        "runs of this machine give list, status, logs or reproduce --local"
    )


def facts_of(client: ClusterClient) -> Any:
    return read_facts(client, "team", "default", None)


def answer(path: str, content: object) -> None:
    ANSWERS[path] = (200, json.dumps(content))


def test_facts_of_an_empty_cluster(client: ClusterClient) -> None:
    facts = facts_of(client)
    assert facts.served == []
    assert facts.profile is None
    assert all(isinstance(one, UnknownFact) for one in (facts.server_version, facts.operators, facts.may_create_jobs))


def test_facts_of_a_cluster(client: ClusterClient) -> None:
    answer("/version", {"gitVersion": "v1.36.3"})
    answer("/apis/finetune.dev/v1alpha1", {"resources": [{"name": "finetunejobs"}]})
    deployment = {"metadata": {"namespace": "system", "name": "ours"}, "status": {"readyReplicas": 2}}
    starting = {"metadata": {"namespace": "system", "name": "new"}}
    answer(
        "/apis/apps/v1/deployments?labelSelector=app.kubernetes.io/name%3Dfinetune-operator", {"items": [deployment, starting]}
    )
    answer("/apis/finetune.dev/v1alpha1/finetuneprofiles/default", {"spec": {"trainerImage": "trainer:1"}})
    answer("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", {"status": {"allowed": True}})
    classes = [
        {"metadata": {"name": "fast"}},
        {"metadata": {"name": "shared", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}},
    ]
    answer("/apis/storage.k8s.io/v1/storageclasses", {"items": classes})
    facts = facts_of(client)
    assert (facts.server_version, facts.served, facts.may_create_jobs) == ("v1.36.3", ["finetunejobs"], True)
    assert [(one.name, one.ready_replicas) for one in facts.operators] == [("ours", 2), ("new", 0)]
    assert facts.profile == FineTuneProfileSpec(trainer_image="trainer:1")
    assert [(one.name, one.is_default) for one in facts.storage_classes] == [("fast", False), ("shared", True)]


@pytest.mark.parametrize("content", [{}, {"items": [{"metadata": None}]}, {"items": 3}, {"items": ["name"]}])
def test_an_answer_of_an_unknown_form_ends_nothing(client: ClusterClient, content: object) -> None:
    answer("/apis/storage.k8s.io/v1/storageclasses", content)
    assert isinstance(facts_of(client).storage_classes, UnknownFact)


def test_labels_of_the_namespace_are_read_if_the_profile_asks_for_them(client: ClusterClient) -> None:
    place = "/apis/finetune.dev/v1alpha1/finetuneprofiles/default"
    answer(place, {"spec": {"trainerImage": "trainer:1"}})
    assert facts_of(client).namespace_labels is None
    answer(place, {"spec": {"trainerImage": "trainer:1", "namespaceSelector": {"matchLabels": {"gpu": "yes"}}}})
    assert isinstance(facts_of(client).namespace_labels, UnknownFact)
    answer("/api/v1/namespaces/team", {"metadata": {"labels": {"gpu": "no"}}})
    assert facts_of(client).namespace_labels == {"gpu": "no"}
    answer("/api/v1/namespaces/team", {"metadata": {}})
    assert facts_of(client).namespace_labels == {}


def test_a_profile_of_another_release_is_said_to_be_one(client: ClusterClient) -> None:
    answer("/apis/finetune.dev/v1alpha1/finetuneprofiles/default", {"spec": {"trainerImage": "trainer:1", "novelty": 1}})
    found = facts_of(client).profile
    assert isinstance(found, UnknownFact)
    assert "novelty" in found.reason
