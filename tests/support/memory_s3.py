"""An object store in memory, behind boto3's real client: only what would go over the network is answered here."""

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from urllib3 import HTTPResponse

from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.object_store import open_store

BUCKET = "ours"
SHA256_HEADER = "x-amz-meta-sha256"
Answer = tuple[int, dict[str, str], bytes]


@dataclass
class MemoryS3:
    """The objects of one bucket."""

    objects: dict[str, bytes] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    """Digests that the writers of objects announced."""
    before: Callable[[AWSPreparedRequest], Answer | None] = lambda _: None
    """Called with each request; may answer it."""
    seen: list[AWSPreparedRequest] = field(default_factory=list)

    def client(self) -> Any:
        """boto3's client of this store."""
        client = open_store(S3Service("http://store.example", "here"), None, connections=1)
        client.meta.events.register("before-send.s3", self._send)
        return client

    def _send(self, request: AWSPreparedRequest, **_: object) -> AWSResponse:
        self.seen.append(request)
        status, headers, body = self.before(request) or self._answer(request)
        if request.method != "HEAD":
            headers = {"Content-Length": str(len(body)), **headers}
        raw = HTTPResponse(io.BytesIO(b"" if request.method == "HEAD" else body), preload_content=False)
        return AWSResponse(request.url, status, {name.lower(): value for name, value in headers.items()}, raw)

    def _answer(self, request: AWSPreparedRequest) -> Answer:
        address = urlsplit(request.url)
        key, query = unquote(address.path).removeprefix(f"/{BUCKET}").removeprefix("/"), parse_qs(address.query, True)
        if "uploads" in query:
            return 200, {}, b"<Uploads/>"
        if "list-type" in query:
            prefix = query["prefix"][0] if "prefix" in query else ""
            listed = [
                f"<Contents><Key>{name}</Key><Size>{len(value)}</Size><ETag>{etag(value)}</ETag></Contents>"
                for name, value in sorted(self.objects.items())
                if name.startswith(prefix)
            ]
            return 200, {}, f"<List>{''.join(listed)}</List>".encode()
        if request.method == "PUT":
            if request.headers.get("If-None-Match") == b"*" and key in self.objects:
                return HTTPStatus.PRECONDITION_FAILED, {}, b""
            body = request.body
            self.objects[key] = body.read() if hasattr(body, "read") else body
            if SHA256_HEADER in request.headers:
                self.digests[key] = request.headers[SHA256_HEADER].decode()
            return 200, {}, b""
        if key not in self.objects:
            return 404, {}, b""
        return self._object(request, key)

    def _object(self, request: AWSPreparedRequest, key: str) -> Answer:
        content = self.objects[key]
        headers = {"ETag": etag(content)}
        if key in self.digests:
            headers[SHA256_HEADER] = self.digests[key]
        if "If-Match" in request.headers and request.headers["If-Match"].decode() != etag(content):
            return HTTPStatus.PRECONDITION_FAILED, {}, b""
        if "Range" in request.headers:
            start, end = request.headers["Range"].decode().removeprefix("bytes=").split("-")
            return 206, headers, content[int(start) : int(end) + 1]
        return 200, headers | {"Content-Length": str(len(content))}, content


def etag(content: bytes) -> str:
    """Changes with the content."""
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
