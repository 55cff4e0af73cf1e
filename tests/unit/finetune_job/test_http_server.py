"""The server that liveness depends on, under those who would keep it busy."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from statistics import median

import pytest

from finetune_job import http_server
from finetune_job.http_server import CONNECTIONS, REQUEST_BYTES, Answer, HttpServer

IDLE = 400


@contextmanager
def serving(**more: Callable[[], Answer]) -> Iterator[HttpServer]:
    routes = {"/healthz": lambda: Answer(b"ok\n")} | {f"/{name}": route for name, route in more.items()}
    server = HttpServer("127.0.0.1", 0, routes, name="tested")
    server.start()
    try:
        yield server
    finally:
        server.stop()


def ask(server: HttpServer, request: bytes = b"GET /healthz HTTP/1.1\r\nHost: it\r\n\r\n") -> bytes:
    """All that is answered until the end of the connection."""
    with socket.create_connection(server.address, timeout=30) as client:
        client.sendall(request)
        return read_all(client)


def read_all(client: socket.socket) -> bytes:
    answer = b""
    while piece := client.recv(65536):
        answer += piece
    return answer


def is_closed(client: socket.socket) -> bool:
    """Waits for the end of the connection; an answer that comes first is passed over."""
    with suppress(ConnectionError):
        read_all(client)
    return True


def seconds_of_health(server: HttpServer) -> float:
    started = time.monotonic()
    assert ask(server).endswith(b"\r\n\r\nok\n")
    return time.monotonic() - started


def test_answers_get_and_head_by_path_without_its_query() -> None:
    with serving(page=lambda: Answer(b"{}", "application/json")) as server:
        answer = ask(server, b"GET /page?a=b HTTP/1.1\r\nHost: it\r\n\r\n")
        assert answer == b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
        assert ask(server, b"HEAD /page HTTP/1.0\r\n\r\n").endswith(b"Content-Length: 2\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /else HTTP/1.1", b"404 Not Found"),
        (b"POST /healthz HTTP/1.1", b"405 Method Not Allowed"),
        (b"\x16\x03\x01\x02\x00 TLS", b"400 Bad Request"),
        (b"GET /healthz", b"400 Bad Request"),
        (b"PRI * HTTP/2.0", b"400 Bad Request"),
        (b"", b"400 Bad Request"),
    ],
)
def test_other_requests_are_refused(request_line: bytes, status: bytes) -> None:
    with serving() as server:
        assert ask(server, request_line + b"\r\n\r\n").startswith(b"HTTP/1.1 " + status)


def test_route_that_fails_answers_500_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Answer:
        raise ValueError("why")

    with serving(broken=broken) as server:
        assert ask(server, b"GET /broken HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 500 ")
        seconds_of_health(server)
    assert "route /broken failed" in caplog.text


def test_idle_connections_take_no_threads_delay_nobody_and_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTION_SECONDS", 1.0)
    with serving() as server, ExitStack() as stack:
        before = threading.active_count()
        clients = [stack.enter_context(socket.create_connection(server.address, timeout=30)) for _ in range(IDLE)]
        assert median(seconds_of_health(server) for _ in range(21)) < 1
        assert threading.active_count() == before
        assert len(server._connections) <= CONNECTIONS
        for client in clients:
            assert is_closed(client)
        assert not server._connections


def test_requests_that_come_byte_by_byte_delay_nobody_and_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTION_SECONDS", 1.0)
    with serving() as server, ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(server.address, timeout=30)) for _ in range(CONNECTIONS - 1)]
        living, deadline = set(clients), time.monotonic() + 30
        seconds = []
        while living:
            assert time.monotonic() < deadline, f"{len(living)} connections are still open"
            for client in list(living):
                try:
                    client.sendall(b"G")
                except OSError:
                    living.remove(client)
            seconds.append(seconds_of_health(server))
        assert median(seconds) < 1


@pytest.mark.parametrize("ending", [b"", b"\r\n\r\n"])
def test_headers_that_are_too_long_are_refused_and_not_kept(ending: bytes) -> None:
    with serving() as server:
        assert ask(server, b"GET /healthz HTTP/1.1\r\nA: " + b"a" * (REQUEST_BYTES - 100) + b"\r\n\r\n").endswith(b"ok\n")
        with socket.create_connection(server.address, timeout=30) as client:
            # The rest is not read, so the answer may be lost in the reset of the connection; what matters is that it ends.
            with suppress(OSError):
                client.sendall((b"GET /healthz HTTP/1.1\r\nA: " + b"a" * (4 * REQUEST_BYTES)) * 100 + ending)
            assert is_closed(client)
        assert ask(server, b"GET / HTTP/1.1\r\nA: " + b"a" * REQUEST_BYTES).startswith(b"HTTP/1.1 431 ")
        seconds_of_health(server)


def test_client_that_reads_no_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTION_SECONDS", 1.0)
    with serving(page=lambda: Answer(b"a" * (16 << 20))) as server, ExitStack() as stack:
        client = stack.enter_context(socket.create_connection(server.address, timeout=30))
        client.sendall(b"GET /page HTTP/1.1\r\n\r\n")
        seconds_of_health(server)
        client.recv(1)
        deadline = time.monotonic() + 30
        while server._connections:
            assert time.monotonic() < deadline
            seconds_of_health(server)


def test_newcomer_takes_the_place_of_the_oldest() -> None:
    with serving() as server, ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(server.address, timeout=30)) for _ in range(CONNECTIONS)]
        seconds_of_health(server)
        assert is_closed(clients[0])
        clients[1].sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert read_all(clients[1]).endswith(b"ok\n")


def test_stop_ends_thread_connections_and_frees_the_port() -> None:
    with serving() as server:
        seconds_of_health(server)
        client = socket.create_connection(server.address, timeout=30)
        client.sendall(b"GET")
        seconds_of_health(server)
    assert not server._thread.is_alive()
    with client:
        assert is_closed(client)
    again = HttpServer(*server.address, {}, name="again")
    again.stop()


def test_taken_port_is_an_error() -> None:
    with serving() as server, pytest.raises(OSError, match="in use"):
        HttpServer(*server.address, {}, name="second")
