"""A real S3 server on an address of this machine: versitygw, which keeps objects as files."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boto3.session import Session

from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.object_store import open_store
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

    def make_bucket(self, name: str) -> None:
        """Create a bucket if it does not exist."""
        (self.buckets / name).mkdir(exist_ok=True)

    def client(self) -> Any:
        """Return boto3's client, with the right keys."""
        session = Session(aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY)
        return open_store(S3Service(self.address, REGION), session, connections=8)

    def upload(self, name: str, objects: dict[str, bytes]) -> None:
        """Put objects into a bucket."""
        self.make_bucket(name)
        client = self.client()
        for key, content in objects.items():
            client.put_object(Bucket=name, Key=key, Body=content)

    def objects(self, name: str, prefix: str) -> dict[str, bytes]:
        """Return the objects of a bucket below a prefix, by their keys without the prefix."""
        client, below = self.client(), f"{prefix}/"
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=name, Prefix=below)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return {key.removeprefix(below): client.get_object(Bucket=name, Key=key)["Body"].read() for key in keys}

    def environment(self) -> dict[str, str]:
        """Return the environment variables with a client's credentials."""
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}


@contextmanager
def running_s3(program: Path, directory: Path, host: str = "127.0.0.1") -> Iterator[S3Server]:
    """Start `program` (versitygw) with its files below `directory`, on a free port of `host`."""
    buckets, metadata = directory / "buckets", directory / "metadata"
    for folder in (buckets, metadata):
        folder.mkdir(parents=True)
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
