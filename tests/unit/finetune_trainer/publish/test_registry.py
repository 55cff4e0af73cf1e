"""Ways into a registry and out of it: tokens, redirects, and to whom credentials go. The real server is in tests/integration."""

import base64
import json
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from finetune_job.api.base import RegistryPath
from finetune_trainer.credentials import RegistryLogin
from finetune_trainer.errors import DestinationRefusedError
from finetune_trainer.network.retry import TransientError
from finetune_trainer.publish.http import HttpClient
from finetune_trainer.publish.registry import Challenge, Registry, parse_challenges

CANARY = "canary-that-sings"
LOGIN = RegistryLogin("user", CANARY)
BASIC = "Basic " + base64.b64encode(f"user:{CANARY}".encode()).decode()


@dataclass
class Request:
    method: str
    path: str
    authorization: str | None
    body: bytes

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}


@dataclass
class Server:
    """Answers with what `answer` gives: status, headers, body."""

    address: str = ""
    seen: list[Request] = field(default_factory=list)
    answer: Callable[[Request], tuple[int, dict[str, str], bytes]] = lambda _: (200, {}, b"")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server]]:
    """A registry and another host."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ExitStack() as stack:
        yield served(stack), served(stack)


def served(stack: ExitStack) -> Server:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            request = Request(self.command, self.path, self.headers["Authorization"], body)
            server.seen.append(request)
            status, headers, content = server.answer(request)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = _serve  # noqa: N815
        do_PUT = _serve  # noqa: N815
        do_POST = _serve  # noqa: N815
        do_PATCH = _serve  # noqa: N815
        do_HEAD = _serve  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    listening = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
    threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    stack.callback(listening.shutdown)
    server.address = f"http://127.0.0.1:{listening.server_address[1]}"
    return server


def registry_at(server: Server, login: RegistryLogin | None = LOGIN, *, plain_http: bool = True) -> Registry:
    place = RegistryPath(registry=server.address.removeprefix("http://"), repository="team/model", tag="v1")
    return Registry(HttpClient(threading.Event()), place, login, plain_http=plain_http)


def needs_token(tokens: Server, token: str = "the-token") -> Callable[[Request], tuple[int, dict[str, str], bytes]]:
    challenge = f'Bearer realm="{tokens.address}/token?a=b",service="the-service",scope="repository:team/model:pull"'

    def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        if request.authorization == f"Bearer {token}":
            return 200, {}, b"in"
        return 401, {"WWW-Authenticate": challenge}, b""

    return answer


@pytest.mark.parametrize("field_name", ["token", "access_token"])
@pytest.mark.parametrize(("login", "authorization"), [(LOGIN, BASIC), (None, None)])
def test_a_token_is_asked_for_once_with_the_rights_to_write(servers, login, authorization, field_name):
    registry, tokens = servers
    registry.answer = needs_token(tokens)
    tokens.answer = lambda _: (200, {}, json.dumps({field_name: "the-token"}).encode())
    asked = registry_at(registry, login)
    for _ in range(3):
        assert asked.send("PUT", asked.url("x"), {}, b"body", what="trying").content == b"in"
    [request] = tokens.seen
    assert (request.method, request.authorization) == ("GET", authorization)
    assert request.query == {"a": "b", "service": "the-service", "scope": "repository:team/model:pull,push"}
    assert [request.authorization for request in registry.seen] == [None, *["Bearer the-token"] * 3]
    assert registry.seen[-1].body == b"body"


def test_an_identity_token_is_exchanged(servers):
    registry, tokens = servers
    registry.answer = needs_token(tokens)
    tokens.answer = lambda _: (200, {}, b'{"access_token": "the-token"}')
    asked = registry_at(registry, RegistryLogin("<token>", CANARY, CANARY))
    assert asked.send("GET", asked.url("x"), what="trying").content == b"in"
    [request] = tokens.seen
    form = {name: values[0] for name, values in parse_qs(request.body.decode()).items()}
    assert (request.method, request.authorization) == ("POST", None)
    assert (form["grant_type"], form["refresh_token"]) == ("refresh_token", CANARY)


def test_a_token_that_ran_out_is_asked_for_again(servers):
    registry, tokens = servers
    registry.answer = needs_token(tokens, "first")
    tokens.answer = lambda _: (200, {}, json.dumps({"token": ["first", "second"][len(tokens.seen) - 1]}).encode())
    asked = registry_at(registry)
    asked.send("GET", asked.url("x"), what="trying")
    registry.answer = needs_token(tokens, "second")
    assert asked.send("GET", asked.url("x"), what="trying").content == b"in"
    assert len(tokens.seen) == 2


@pytest.mark.parametrize(("login", "words"), [(LOGIN, "may not write there"), (None, "name a Secret with")])
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_names_the_field_and_shows_no_secret(servers, login, words, status):
    registry, _ = servers
    says = json.dumps({"errors": [{"code": "DENIED", "message": f"{CANARY} may not"}]}).encode()
    registry.answer = lambda _: (status, {"WWW-Authenticate": 'Basic realm="r"'}, says)
    asked = registry_at(registry, login)
    with pytest.raises(DestinationRefusedError, match=f"HTTP status {status}, DENIED, trying") as caught:
        asked.send("GET", asked.url("x"), what="trying")
    assert words in caught.value.hint
    assert "spec.output.secretRef" in caught.value.hint
    assert CANARY not in "".join(traceback.format_exception(caught.value)) + caught.value.hint
    assert len(registry.seen) <= 2


def test_a_token_service_that_refuses_or_is_broken(servers):
    registry, tokens = servers
    registry.answer = needs_token(tokens)
    asked = registry_at(registry)
    tokens.answer = lambda _: (503, {"Retry-After": "7"}, b"")
    with pytest.raises(TransientError) as caught:
        asked.send("GET", asked.url("x"), what="trying")
    assert caught.value.retry_after_seconds == 7
    tokens.answer = lambda _: (401, {}, CANARY.encode())
    with pytest.raises(DestinationRefusedError, match="401"):
        asked.send("GET", asked.url("x"), what="trying")


def test_credentials_stay_with_the_registry_when_it_sends_us_on(servers):
    registry, storage = servers

    def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        if request.authorization != BASIC:
            return 401, {"WWW-Authenticate": 'Basic realm="r"'}, b""
        return 307, {"Location": f"{storage.address}/signed?Signature=x%2Fy"}, b""

    registry.answer = answer
    storage.answer = lambda _: (201, {}, b"stored")
    asked = registry_at(registry)
    assert asked.send("PUT", asked.url("x"), {}, b"body", what="trying").content == b"stored"
    [request] = storage.seen
    assert (request.path, request.authorization, request.body) == ("/signed?Signature=x%2Fy", None, b"body")
    # An upload that continues elsewhere is told by its location alone.
    asked.send("PUT", f"{storage.address}/upload", {}, b"body", what="trying")
    assert storage.seen[-1].authorization is None


def test_a_registry_with_tls_gives_nothing_away_without_it(servers):
    registry, _ = servers
    asked = registry_at(registry, plain_http=False)
    assert asked.url("x").startswith("https://")
    registry.answer = lambda _: (401, {"WWW-Authenticate": f'Bearer realm="{registry.address}/token"'}, b"")
    with pytest.raises(DestinationRefusedError, match="without TLS"):
        asked.send("GET", f"{registry.address}/v2/x", what="trying")
    registry.answer = lambda _: (307, {"Location": f"{registry.address}/elsewhere"}, b"")
    with pytest.raises(DestinationRefusedError, match="without TLS"):
        asked.send("GET", f"{registry.address}/v2/x", what="trying")
    assert [request.authorization for request in registry.seen] == [None, None]


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (429, TransientError, "429"),
        (500, TransientError, "500"),
        (413, DestinationRefusedError, "no room"),
        (404, DestinationRefusedError, "no such repository"),
        (400, DestinationRefusedError, "refuses the request"),
    ],
)
def test_what_an_answer_means(servers, status, kind, words):
    registry, _ = servers
    registry.answer = lambda _: (status, {}, b"<html>")
    asked = registry_at(registry)
    with pytest.raises(kind, match=words):
        asked.check(asked.send("GET", asked.url("x"), what="trying"), "trying")


def test_docker_hub_has_another_address():
    place = RegistryPath(registry="docker.io", repository="model", tag="v1")
    registry = Registry(HttpClient(threading.Event()), place, None, plain_http=False)
    assert registry.url("tags/list") == "https://registry-1.docker.io/v2/library/model/tags/list"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("Basic", [Challenge("basic", {})]),
        ('Basic realm="x, Bearer y"', [Challenge("basic", {"realm": "x, Bearer y"})]),
        (
            'Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a/b:pull,push"',
            [
                Challenge(
                    "bearer",
                    {"realm": "https://auth.example/token", "service": "registry.example", "scope": "repository:a/b:pull,push"},
                )
            ],
        ),
        (
            'Negotiate, bearer realm="r", Basic realm="b"',
            [Challenge("bearer", {"realm": "r"}), Challenge("basic", {"realm": "b"})],
        ),
        ("", []),
    ],
)
def test_ways_into_a_registry(header, found):
    assert parse_challenges(header) == found
