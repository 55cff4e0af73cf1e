"""Who is answered on /metrics, what the API server is asked, and what becomes of a certificate that is renewed."""

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from finetune_job.http_server import CONNECTIONS, HttpServer
from finetune_operator.client.answers import ApiError, ApiUnreachableError
from finetune_operator.metrics.health import Health, health_server
from finetune_operator.metrics.metrics_gate import (
    ALLOWED_SECONDS,
    CERTIFICATE_SECONDS,
    MOST_VERDICTS,
    REFUSED_SECONDS,
    Certificate,
    MetricsGate,
)
from tests.unit.finetune_operator.fakes import Clock

PROMETHEUS = {"username": "system:serviceaccount:monitoring:prometheus", "groups": ["system:serviceaccounts"], "uid": "u"}


class Reviews:
    """The API server's reviews: users by token, of whom one may read the metrics."""

    def __init__(self) -> None:
        self.users: dict[str, Any] = {"of-prometheus": PROMETHEUS, "of-tenant": {"username": "tenant"}}
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.fail: list[Exception] = []
        self.closed = False

    async def request(self, method: str, path: str, *, body: Mapping[str, Any]) -> dict[str, Any]:
        assert method == "POST"
        if self.fail:
            raise self.fail.pop(0)
        self.asked.append((path, body["spec"]))
        if body["kind"] == "TokenReview":
            user = self.users.get(body["spec"]["token"])
            return {"status": {"authenticated": user is not None, "user": user}}
        return {"status": {"allowed": body["spec"]["user"] == PROMETHEUS["username"]}}

    async def close(self) -> None:
        self.closed = True


class Scene:
    def __init__(self) -> None:
        self.api, self.clock = Reviews(), Clock()
        self.connections = 0
        self.gate = MetricsGate(self._connect, self.clock)

    async def _connect(self) -> Any:
        self.connections += 1
        return self.api

    def ask(self, *authorizations: str, path: str = "/metrics") -> list[int]:
        """The statuses; 200: let through."""

        async def all_of_them() -> list[int]:
            refusals = [await self.gate.refusal(path, one) for one in authorizations]
            return [200 if one is None else one.status.value for one in refusals]

        return asyncio.run(all_of_them())


def test_a_known_reader_with_the_right_is_answered_and_nobody_else() -> None:
    scene = Scene()
    asked = ("Bearer of-prometheus", "bearer  of-prometheus ", "Bearer of-tenant", "Bearer unknown", "", "Bearer ", "Basic eDp5")
    assert scene.ask(*asked) == [200, 200, 403, 401, 401, 401, 401]
    assert scene.api.asked[:2] == [
        ("/apis/authentication.k8s.io/v1/tokenreviews", {"token": "of-prometheus"}),
        (
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {
                "user": PROMETHEUS["username"],
                "groups": PROMETHEUS["groups"],
                "uid": "u",
                "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
            },
        ),
    ]
    assert scene.connections == 1
    asyncio.run(scene.gate.close())
    assert scene.api.closed


def test_the_kubelet_needs_no_token() -> None:
    scene = Scene()
    assert scene.ask("", path="/healthz") + scene.ask("", path="/readyz") == [200, 200]
    assert scene.api.asked == []


def test_an_answer_is_believed_for_a_while() -> None:
    scene = Scene()
    scene.ask("Bearer of-prometheus", "Bearer of-tenant", "Bearer of-prometheus", "Bearer of-tenant")
    assert len(scene.api.asked) == 4
    scene.clock.advance(REFUSED_SECONDS)
    scene.api.users["of-tenant"] = PROMETHEUS
    assert scene.ask("Bearer of-tenant", "Bearer of-prometheus") == [200, 200]
    assert len(scene.api.asked) == 6
    scene.clock.advance(ALLOWED_SECONDS)
    del scene.api.users["of-prometheus"]
    assert scene.ask("Bearer of-prometheus") == [401]
    # Any number of tokens of strangers leaves a bounded number of verdicts.
    scene.ask(*(f"Bearer guess-{number}" for number in range(MOST_VERDICTS + 9)))
    assert len(scene.gate._verdicts) == MOST_VERDICTS


@pytest.mark.parametrize("error", [ApiError("POST", 403, "Forbidden", "no auth-delegator"), ApiUnreachableError("gone")])
def test_without_an_answer_nobody_is_let_in_and_the_next_is_asked_again(error: Exception) -> None:
    scene = Scene()
    scene.api.fail = [error]
    assert scene.ask("Bearer of-prometheus", "Bearer of-prometheus") == [503, 200]


@pytest.mark.parametrize("status", [None, {}, {"authenticated": True}, {"authenticated": True, "user": "admin"}, "yes"])
def test_an_answer_of_another_form_lets_nobody_in(status: Any) -> None:
    scene = Scene()

    async def answers(*_: Any, **__: Any) -> dict[str, Any]:
        return {"status": status}

    scene.api.request = answers  # type: ignore[method-assign]
    assert scene.ask("Bearer of-prometheus") == [401]


def make_certificate(directory: Path, name: str) -> Path:
    """tls.crt and tls.key of an authority of its own."""
    directory.mkdir(exist_ok=True)
    make = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name}"
    made = [
        *make.split(),
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        directory / "tls.key",
        "-out",
        directory / "tls.crt",
    ]
    subprocess.run(made, check=True, capture_output=True)
    return directory


def fetch(server: HttpServer, authority: Path, path: str, token: str = "") -> str:
    """Status line and body. Raises ssl.SSLError."""
    context = ssl.create_default_context(cafile=str(authority))
    with (
        socket.create_connection(server.address, timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as one,
    ):
        one.sendall(f"GET {path} HTTP/1.1\r\nHost: it\r\nauthorization: Bearer {token}\r\n\r\n".encode())
        answer = b""
        while piece := one.recv(65536):
            answer += piece
    head, _, body = answer.decode().partition("\r\n\r\n")
    return f"{head.splitlines()[0].removeprefix('HTTP/1.1 ')}: {body}"


def test_the_server_speaks_tls_asks_who_reads_and_takes_up_a_new_certificate(tmp_path: Path) -> None:
    scene, registry = Scene(), CollectorRegistry()
    Gauge("jobs", "Jobs.", registry=registry).set(3)
    files, clock = make_certificate(tmp_path / "tls", "first"), Clock()
    first = shutil.copy(files / "tls.crt", tmp_path / "first.crt")
    server = health_server("127.0.0.1", 0, Health(), registry, gate=scene.gate, tls=Certificate(files, clock))
    server.start()
    try:
        assert fetch(server, first, "/healthz") == "200 OK: ok\n"
        assert "jobs 3.0" in fetch(server, first, "/metrics", "of-prometheus")
        assert fetch(server, first, "/metrics", "of-tenant").startswith("403 Forbidden: Forbidden: no ClusterRole of yours")
        with ExitStack() as idle:
            # Handshakes that never end keep no probe waiting.
            for _ in range(2 * CONNECTIONS):
                idle.enter_context(socket.create_connection(server.address, timeout=30))
            assert fetch(server, first, "/healthz") == "200 OK: ok\n"
        make_certificate(files, "second")
        with pytest.raises(ssl.SSLError):
            fetch(server, files / "tls.crt", "/healthz")
        clock.advance(CERTIFICATE_SECONDS)
        assert fetch(server, files / "tls.crt", "/healthz") == "200 OK: ok\n"
        # Half written: what was there stays.
        second = shutil.copy(files / "tls.crt", tmp_path / "second.crt")
        (files / "tls.key").write_text("half")
        os.utime(files / "tls.key", ns=(1, 1))
        clock.advance(CERTIFICATE_SECONDS)
        assert fetch(server, second, "/healthz") == "200 OK: ok\n"
    finally:
        server.stop()
    assert scene.api.closed
