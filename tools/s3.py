"""A real S3 server on an address of this machine: versitygw, which keeps objects as files."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import obstore
from obstore.store import S3Store

from tools.cluster.errors import wait_until
from tools.cluster.processes import Component, start_component

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key-of-the-server"
REGION = "eu-test-1"
_START_SECONDS = 60.0


@dataclass(frozen=True)
class S3Server:
    """A running server."""

    address: str
    buckets: Path
    """Each directory in it is a bucket."""
    server: Component

    def bucket(self, name: str, secret_key: str = SECRET_KEY) -> S3Store:
        """The bucket of that name, made if it is not there."""
        (self.buckets / name).mkdir(exist_ok=True)
        return S3Store(
            name,
            endpoint=self.address,
            region=REGION,
            access_key_id=ACCESS_KEY,
            secret_access_key=secret_key,
            client_options={"allow_http": True},
        )

    def upload(self, name: str, objects: dict[str, bytes]) -> None:
        """Put objects into a bucket."""
        store = self.bucket(name)
        for key, content in objects.items():
            obstore.put(store, key, content)

    def environment(self) -> dict[str, str]:
        """What a client's environment needs to get in."""
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}


@contextmanager
def running_s3(program: Path, directory: Path, host: str = "127.0.0.1") -> Iterator[S3Server]:
    """Start `program` (versitygw) with its files below `directory`, on a free port of `host`."""
    buckets, metadata = directory / "buckets", directory / "metadata"
    for each in (buckets, metadata):
        each.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = int(probe.getsockname()[1])
    command: list[str | Path] = [program, "--port", f"{host}:{port}", "--quiet", "--keep-alive", "--region", REGION]
    command += ["--access", ACCESS_KEY, "--secret", SECRET_KEY, "posix", "--sidecar", metadata, buckets]
    server = start_component("versitygw", command, directory / "versitygw.log")
    try:
        wait_until(lambda: _answers(server, host, port), f"versitygw, see {server.log}", _START_SECONDS)
        yield S3Server(f"http://{host}:{port}", buckets, server)
    finally:
        server.kill()


def _answers(server: Component, host: str, port: int) -> bool:
    server.check_running()
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
