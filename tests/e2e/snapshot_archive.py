"""Debian's archive of snapshots as a proxy plays it: of one point in time it has what the mirrors have now.

The archive cannot be asked here. apt, its lines, signatures and packages are real.
"""

import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

_ADDRESS = re.compile(
    r"http://snapshot\.debian\.org/archive/(?P<repository>debian(-security)?)/(?P<time>\d{8}T\d{6}Z)/(?P<file>.+)"
)
_SECONDS = 60
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Not by the proxy of the environment, which is this one."""


@dataclass
class SnapshotArchive:
    """What was asked of it."""

    time: str
    address: str = ""
    """Of the proxy."""
    served: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Addresses of another host or time."""


@contextmanager
def snapshot_archive(time: str) -> Iterator[SnapshotArchive]:
    """Serve a point in time, as 20261101T000000Z, to clients that use the proxy."""
    archive = SnapshotArchive(time)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = _ADDRESS.fullmatch(self.path)
            if asked is None or asked["time"] != time:
                archive.refused.append(self.path)
                self.send_error(403)
                return
            mirror = f"http://deb.debian.org/{asked['repository']}/{asked['file']}"
            try:
                with _DIRECT.open(mirror, timeout=_SECONDS) as found:
                    self.send_response(200)
                    for name in ("Content-Length", "Last-Modified"):
                        if name in found.headers:
                            self.send_header(name, found.headers[name])
                    self.end_headers()
                    shutil.copyfileobj(found, self.wfile)
            except urllib.error.HTTPError as error:
                self.send_error(error.code)
            archive.served.append(self.path)

        def log_message(self, *_: object) -> None:
            """The test says what it needs."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        archive.address = f"http://127.0.0.1:{server.server_port}"
        serving = Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield archive
        finally:
            server.shutdown()
            serving.join()
