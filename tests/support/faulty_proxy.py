"""An HTTP server that passes every request on to another one, and breaks the chosen ones.

Requests keep their Host, so that signatures over it hold.
"""

import http.client
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PIECE_BYTES = 64 * 1024


class Moment(StrEnum):
    """Points of a request at which `watch` is called."""

    ARRIVED = "arrived"
    """Nothing has been passed on."""
    HALF = "half"
    """Half of the body has been passed on."""
    DONE = "done"
    """The server has answered, and the client does not know it yet."""


@dataclass
class Fault:
    """A fault of requests whose line holds a text. `times` counts down, and at 0 the fault ends."""

    text: str
    times: int
    content_range: str = ""
    """Only requests whose Content-Range begins with this, such as `33554432-`."""
    status: int | None = None
    """AnsweredRequest at once."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_at: Moment | None = None
    """The client's connection is closed at this moment."""


@dataclass(frozen=True)
class Seen:
    """A request as it came."""

    line: str
    headers: dict[str, str]
    """Names in lower case."""


class FaultyProxy:
    """An HTTP server that passes requests on, breaks some, and records them."""

    def __init__(self, server: str) -> None:
        self.server, self.host = server, ""
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.watch: Callable[[int, Moment], None] = lambda _number, _moment: None
        """Told the number of the request, from 0."""
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://{self.host}"

    def fail(self, text: str, times: int = 1, **what: object) -> None:
        """Break the next requests whose line, such as `PUT /bucket/key`, holds the text."""
        self.faults.append(Fault(text, times, **what))  # type: ignore[arg-type]

    def arrive(self, seen: Seen) -> tuple[int, Fault | None]:
        """Number of a request, and what happens to it."""
        with self._lock:
            self.seen.append(seen)
            for fault in self.faults:
                is_meant = fault.text in seen.line and seen.headers.get("content-range", "").startswith(fault.content_range)
                if fault.times > 0 and is_meant:
                    fault.times -= 1
                    return len(self.seen) - 1, fault
            return len(self.seen) - 1, None


@contextmanager
def running_proxy(server: str) -> Iterator[FaultyProxy]:
    """Stand before `server`, a host with its port, on a free port."""
    proxy = FaultyProxy(server)

    class Handler(_Handler):
        pass

    Handler.proxy = proxy
    with _Server(("127.0.0.1", 0), Handler) as listening:
        proxy.host = f"127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield proxy
        listening.shutdown()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Threads of clients that were killed end with their connections, whenever that is.
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):  # clients may go away
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _CutError(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultyProxy
    protocol_version = "HTTP/1.1"
    # Headers and body are written apart; the second would wait for an acknowledgement of the first.
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        seen = Seen(f"{self.command} {self.path}", {name.lower(): value for name, value in self.headers.items()})
        number, fault = self.proxy.arrive(seen)
        try:
            self._reach(number, Moment.ARRIVED, fault)
            if fault is not None and fault.status is not None:
                self._refuse(fault)
            else:
                self._pass_on(number, fault)
        except _CutError:
            self.close_connection = True
        except (OSError, http.client.HTTPException):
            self.close_connection = True

    def _reach(self, number: int, moment: Moment, fault: Fault | None) -> None:
        self.proxy.watch(number, moment)
        if fault is not None and fault.cut_at is moment:
            raise _CutError

    def _refuse(self, fault: Fault) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.send_response(fault.status or 500)
        for name, value in fault.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(fault.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(fault.body)

    def _pass_on(self, number: int, fault: Fault | None) -> None:
        server = http.client.HTTPConnection(self.proxy.server, timeout=120)
        try:
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    server.putheader(name, value)
            server.putheader("Connection", "close")
            server.endheaders()
            length = left = int(self.headers.get("Content-Length", "0"))
            is_half = False
            while left:
                if not is_half and left <= length // 2:
                    is_half = True
                    self._reach(number, Moment.HALF, fault)
                piece = self.rfile.read(min(_PIECE_BYTES, left))
                if not piece:
                    raise _CutError
                server.send(piece)
                left -= len(piece)
            answer = server.getresponse()
            content = answer.read()
            self._reach(number, Moment.DONE, fault)
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in {"connection", "transfer-encoding", "content-length", "date", "server"}:
                    self.send_header(name, value)
            # An answer to HEAD speaks of a body that does not come.
            length_told = answer.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length_told)
            self.end_headers()
            self.wfile.write(content)
        finally:
            server.close()

    do_GET = _serve  # noqa: N815
    do_HEAD = _serve  # noqa: N815
    do_PUT = _serve  # noqa: N815
    do_POST = _serve  # noqa: N815
    do_PATCH = _serve  # noqa: N815
    do_DELETE = _serve  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Tests look at `seen`."""
