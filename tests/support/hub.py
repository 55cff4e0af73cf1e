"""A hub on the loopback interface, for the real huggingface_hub client: repositories, two stores of files, and faults on demand.

It is written to in hub_writes.py.

Files in large file storage are served by a second server, to which `resolve` sends the client with a signed address, as a content
delivery network would: so a client that carries its token along is seen, in `Hub.requests`.
"""

import hashlib
import json
import re
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.hub_writes import LARGE_BYTES, MAIN, SIGNATURE, Repository, Writes, commit_of, git_blob

PAGE_ENTRIES = 3
"""Number of entries on a page of a listing. It is small, so that clients must follow the pages."""


@dataclass
class Fault:
    """A fault of requests for a path. `times` counts down, and at 0 the fault ends."""

    times: int
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    """Bytes of the body after which the connection is closed."""
    corrupt: bool = False
    """Flip a bit of the body."""
    ignore_range: bool = False
    """Answer with the whole file."""
    body: bytes = b"{}"
    """Body of the answer if `status` is set."""
    take: int | None = None
    """Bytes of the request's body after which the connection is closed."""
    drop_answer: bool = False
    """Do what is asked, then close the connection instead of saying so."""
    before: Callable[[], object] | None = None
    """Called before the answer."""


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    method: str
    path: str
    headers: Message
    store: bool
    """It reached the store of large files."""


class Hub:
    """Content, faults and memory of both servers."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[Request] = []
        self.sent: dict[str, int] = {}
        """Bytes of bodies sent, by file name."""
        self.store_address = self.address = ""
        self.writes = Writes()
        self._faults: dict[str, list[Fault]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, files: dict[str, bytes], kind: str = "models", token: str | None = None) -> str:
        """Put a repository up; its commit."""
        commit = commit_of(files)
        self.repositories[kind, name] = Repository(files, commit, token)
        return commit

    def fail(self, part: str, fault: Fault) -> None:
        """Let requests whose path holds `part` meet a fault; several are met one after the other."""
        self._faults.setdefault(part, []).append(fault)

    def fault_of(self, path: str) -> Fault | None:
        """The fault that this request meets."""
        with self._lock:
            for part, faults in self._faults.items():
                if part in path:
                    for fault in faults:
                        if fault.times > 0:
                            fault.times -= 1
                            return fault
        return None

    def count(self, name: str, number: int) -> None:
        """Note bytes that were sent."""
        with self._lock:
            self.sent[name] = self.sent.get(name, 0) + number

    def remember(self, request: Request) -> None:
        """Note a request."""
        with self._lock:
            self.requests.append(request)

    def downloads(self) -> list[str]:
        """Names of the files that were asked for, from the hub itself."""
        return [
            unquote(request.path).split("/resolve/")[1].split("/", 1)[1]
            for request in self.requests
            if "/resolve/" in request.path
        ]


@contextmanager
def running_hub(tls: ssl.SSLContext | None = None) -> Iterator[Hub]:
    """Both servers on free ports, with the certificate of `tls` if there is one."""
    hub = Hub()
    with ExitStack() as stack:
        hub.address = stack.enter_context(_serving(hub, tls, store=False))
        hub.store_address = stack.enter_context(_serving(hub, tls, store=True))
        yield hub


@contextmanager
def _serving(hub: Hub, tls: ssl.SSLContext | None, *, store: bool) -> Iterator[str]:
    class Handler(_Handler):
        pass

    Handler.hub, Handler.store = hub, store
    with _Server(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that were killed, or that waited no longer, are what the tests are about."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub
    store: bool

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.hub.remember(Request(self.command, self.path, self.headers, self.store))
        fault = self.hub.fault_of(unquote(self.path))
        if fault is not None and fault.before is not None:
            fault.before()
        body = self._body(fault)
        if body is None:
            return
        if fault is not None and fault.status is not None:
            self._send(fault.status, fault.body, fault.headers)
            return
        address = urlsplit(self.path)
        written = self.hub.writes.answer(self.hub, self.command, self.path, self.headers, body, store=self.store)
        if written is not None:
            if fault is not None and fault.drop_answer:
                self.close_connection = True
                return
            self._send(written.status, written.body, written.headers)
            return
        if self.store:
            self._from_store(address.path, fault)
            return
        match = re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([0-9a-f]+|main)(?:/(.*))?)?", address.path
        )
        if match:
            repository = self._repository(match[1], match[2], match[4] or MAIN)
            if repository is not None:
                self._metadata(repository, match[3] or "revision", unquote(match[5] or ""), parse_qs(address.query), body)
            return
        match = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([0-9a-f]+|main)/(.+)", address.path)
        if match:
            repository = self._repository("datasets" if match[1] else "models", match[2], match[3])
            if repository is not None:
                self._resolve(repository, unquote(match[4]), fault)
            return
        self._send(404, b"{}")

    def _body(self, fault: Fault | None) -> bytes | None:
        """The request's body; None where the connection ends before it does."""
        wanted = int(self.headers.get("Content-Length", 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            return self._chunks()
        if fault is not None and fault.take is not None:
            self.rfile.read(min(wanted, fault.take))
            self.close_connection = True
            return None
        content = self.rfile.read(wanted)
        if len(content) < wanted:
            self.close_connection = True
            return None
        return content

    def _chunks(self) -> bytes | None:
        content = b""
        while (line := self.rfile.readline().strip()) not in {b"0", b""}:
            content += self.rfile.read(int(line, 16))
            self.rfile.readline()
        if not line:
            self.close_connection = True
            return None
        self.rfile.readline()
        return content

    def _repository(self, kind: str, name: str, commit: str) -> Repository | None:
        repository = self.hub.repositories.get((kind, name))
        if repository is None or (repository.token is not None and "Authorization" not in self.headers):
            # A private repository is hidden in the same words as one that does not exist.
            self._send(401, b"{}", {"X-Error-Message": "Invalid username or password."})
            return None
        if repository.token is not None and self.headers["Authorization"] != f"Bearer {repository.token}":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return None
        if commit in repository.older:
            return replace(repository, files=repository.older[commit], commit=commit)
        if commit not in {repository.commit, MAIN}:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return None
        return repository

    def _metadata(self, repository: Repository, what: str, path: str, query: dict[str, list[str]], body: bytes) -> None:
        if what == "revision":
            sha = repository.announced_commit or repository.commit
            self._json({"id": "org/name", "sha": sha, "siblings": [{"rfilename": name} for name in repository.files]})
        elif what == "paths-info":
            wanted = parse_qs(body.decode())["paths"]
            entries = [_entry(name, repository.files[name]) for name in wanted if name in repository.files]
            folders = [name for name in wanted if any(file.startswith(f"{name}/") for file in repository.files)]
            self._json([*entries, *({"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders)])
        else:
            names = sorted(name for name in repository.files if not path or name.startswith(f"{path}/"))
            start = int(query.get("cursor", ["0"])[0])
            headers = {}
            if start + PAGE_ENTRIES < len(names):
                here = self.path.split("?")[0]
                headers["Link"] = f'<{self.hub.address}{here}?recursive=true&cursor={start + PAGE_ENTRIES}>; rel="next"'
            page = names[start : start + PAGE_ENTRIES]
            folders = sorted({name.rpartition("/")[0] for name in page} - {""})
            self._json(
                [
                    *({"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders),
                    *(_entry(name, repository.files[name]) for name in page),
                ],
                headers,
            )

    def _resolve(self, repository: Repository, name: str, fault: Fault | None) -> None:
        content = repository.files.get(name)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif len(content) < LARGE_BYTES:
            self._content(name, content, fault, {"X-Repo-Commit": repository.commit, "ETag": f'"{git_blob(content)}"'})
        else:
            sha256 = hashlib.sha256(content).hexdigest()
            linked = {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
            target = f"{self.hub.store_address}/{sha256}/{name}?Signature={SIGNATURE}"
            self._send(302, b"", {"X-Repo-Commit": repository.commit, "Location": target, **linked})

    def _from_store(self, path: str, fault: Fault | None) -> None:
        for repository in list(self.hub.repositories.values()):
            for name, content in repository.files.items():
                if unquote(path) == f"/{hashlib.sha256(content).hexdigest()}/{name}":
                    self._content(name, content, fault, {})
                    return
        self._send(404, b"")

    def _content(self, name: str, content: bytes, fault: Fault | None, headers: dict[str, str]) -> None:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start, status = 0, 200
        if match and not (fault and fault.ignore_range):
            start, status = int(match[1]), 206
            headers = headers | {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        body = content[start:]
        if fault is not None and fault.corrupt:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if self.command == "HEAD":
            self._head(status, len(body), headers)
            return
        if fault is not None and fault.cut_after is not None:
            self._head(status, len(body), headers)
            self.wfile.write(body[: fault.cut_after])
            self.wfile.flush()
            self.hub.count(name, min(fault.cut_after, len(body)))
            self.close_connection = True
            return
        self.hub.count(name, len(body))
        self._send(status, body, headers)

    def _json(self, value: object, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._head(status, len(body), headers or {})
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": git_blob(content)}
    if len(content) >= LARGE_BYTES:
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry
