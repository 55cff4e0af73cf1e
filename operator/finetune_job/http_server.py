"""A small HTTP server for a few GET routes, shared by the operator (probes and metrics) and rank 0 (progress).

Anyone who can reach the port may connect, so everything is bounded: there is one thread with its own event loop, and there are
limits on the number of connections, the size of a request and the duration of a connection. A new connection above the limit
replaces the oldest one, which has had the most time to send its request; so idle connections never keep a probe waiting.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

CONNECTIONS = 64
"""Maximum number of connections that are open at the same time."""
CONNECTION_SECONDS = 5.0
"""Maximum duration of a connection, in seconds."""
REQUEST_BYTES = 8192
"""Maximum size of the request line and headers together."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """The response of a route."""

    body: bytes
    content_type: str = "text/plain"
    status: HTTPStatus = HTTPStatus.OK


class ReaderCheck(Protocol):
    """Decides which clients are answered. Both methods are called in the server's thread."""

    async def refusal(self, path: str, authorization: str) -> Answer | None:
        """Return the response for a client without permission; None for one with it. authorization: the header, or empty."""

    async def close(self) -> None:
        """Release the check's resources; called when the server ends."""


class HttpServer:
    """A server that listens once constructed and serves from `start` to `stop`. Routes run in its thread: keep them fast."""

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Callable[[], Answer]],
        *,
        name: str,
        gate: ReaderCheck | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """Listen. host: empty for all interfaces. port: 0 for any free port. gate: None lets every client read. tls: called for
        each connection; None for plain HTTP. Raises OSError if listening fails.
        """
        self._socket = socket.create_server((host, port), backlog=2 * CONNECTIONS)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._routes = routes
        self._gate = gate
        self._tls = tls
        self._connections: dict[asyncio.StreamWriter, None] = {}
        """Open connections, oldest first."""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start serving requests."""
        self._thread.start()

    def stop(self) -> None:
        """Free the port, close all connections and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._loop.close()
        self._socket.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, limit=REQUEST_BYTES, backlog=2 * CONNECTIONS)
        await self._stopping.wait()
        server.close()
        if self._gate is not None:
            await self._gate.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(self._connections) >= CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        self._connections[writer] = None
        try:
            async with asyncio.timeout(CONNECTION_SECONDS):
                answering = writer if self._tls is None else await self._secured(reader, writer, self._tls())
                answering.write(await self._response(reader))
                answering.close()
                await answering.wait_closed()
        except (OSError, EOFError, TimeoutError):
            pass  # a client that went away, was cut off, or took too long
        finally:
            self._connections.pop(writer, None)
            writer.transport.abort()

    async def _secured(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext
    ) -> asyncio.StreamWriter:
        """Return the connection after its TLS handshake. asyncio's own handshake would run before the connection is counted."""
        protocol = writer.transport.get_protocol()
        transport = await self._loop.start_tls(
            writer.transport, protocol, context, server_side=True, ssl_handshake_timeout=CONNECTION_SECONDS
        )
        if transport is None:
            raise ConnectionResetError("the client went away during the handshake")
        return asyncio.StreamWriter(transport, protocol, reader, self._loop)

    async def _response(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _encode(error_answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"at most {REQUEST_BYTES} bytes"))
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _encode(error_answer(HTTPStatus.BAD_REQUEST, "not HTTP/1"))
        method, target, _ = words
        if method not in {"GET", "HEAD"}:
            return _encode(error_answer(HTTPStatus.METHOD_NOT_ALLOWED, "GET only"))
        answer = await self._answer(target.partition("?")[0], _header(head, b"authorization"))
        return _encode(answer, has_body=method == "GET")

    async def _answer(self, path: str, authorization: str) -> Answer:
        route = self._routes.get(path)
        if route is None:
            return error_answer(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._routes)}")
        try:
            refusal = None if self._gate is None else await self._gate.refusal(path, authorization)
            return route() if refusal is None else refusal
        except Exception:  # noqa: BLE001 - a route that fails must not end the probes
            _log.exception("route %s failed", path)
            return error_answer(HTTPStatus.INTERNAL_SERVER_ERROR, "see the log")


def _header(head: bytes, name: bytes) -> str:
    """Return the value of the first header with this name; empty if there is none."""
    for line in head.split(b"\r\n")[1:]:
        found, separator, value = line.partition(b":")
        if separator and found.strip().lower() == name:
            return value.strip().decode("latin-1")
    return ""


def error_answer(status: HTTPStatus, why: str) -> Answer:
    """Create an answer that says in one line why the request failed."""
    return Answer(f"{status.phrase}: {why}\n".encode(), status=status)


def _encode(answer: Answer, *, has_body: bool = True) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (answer.body if has_body else b"")
