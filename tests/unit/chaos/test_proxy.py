"""The proxy of the chaos run passes on what the server says, and nothing that the operator could not read."""

from __future__ import annotations

import gzip
import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import certifi
import pytest

from tests.chaos.proxy import ChaosProxy, Seen

TEXT = b'{"items": []}'


class Calm:
    """Weather in which nothing happens."""

    def fault(self, seen: Seen) -> None:
        """None."""

    def watch_seconds(self) -> float:
        """None."""
        return 0.0

    def stall_seconds(self) -> float:
        """None."""
        return 0.0

    async def kill(self) -> None:
        """Nobody."""


class Compressing(BaseHTTPRequestHandler):
    """Compresses for a client that accepts it, as an API server does with long lists."""

    def do_GET(self) -> None:
        """Answer."""
        compressed = "gzip" in self.headers.get("Accept-Encoding", "")
        body = gzip.compress(TEXT) if compressed else TEXT
        self.send_response(200)
        if compressed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Compressing)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.mark.parametrize("accepted", [{}, {"Accept-Encoding": "gzip, deflate"}], ids=["plain", "compressed"])
def test_an_answer_is_never_compressed_without_saying_so(server: str, accepted: dict[str, str]) -> None:
    with ChaosProxy(server, certifi.where(), Calm()) as proxy:
        connection = http.client.HTTPConnection(urlsplit(proxy.address).netloc, timeout=30)
        connection.request("GET", "/apis?limit=500", headers=accepted)
        answer = connection.getresponse()
        assert (answer.getheader("Content-Encoding"), answer.read()) == (None, TEXT)
        connection.close()
