"""`oci://` destinations: every file is sent as a blob, then the manifest is written under its digest, then the tag.

A reader of the tag sees either the previous content or the whole release: the registry accepts a manifest only once it has every
blob, and the tag is written last. The tag `latest`, the default of a destination, moves from release to release, as it does for
container images. Until the registry removes untagged content, the previous release stays available by its digest, which is in the
status of the job that published it. Any other tag is a name that the user chose for one result: if it already names other
content, the publication is refused and nothing is sent.

Blobs that the registry has are not sent again, and an interrupted upload continues at the byte that the registry reports.
Registries built on distribution 2.x forget an upload that was interrupted within a chunk; the blob is then sent from the start.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from finetune_job.api.base import DEFAULT_TAG, RegistryPath
from finetune_trainer.credentials import RegistryLogin
from finetune_trainer.errors import DestinationRefusedError
from finetune_trainer.network.http_status import NOT_FOUND
from finetune_trainer.network.retry import Retries, RetryPolicy, TransientError, with_retries
from finetune_trainer.publish.destination import DESTINATION_FIELD, Publication, destination_unavailable
from finetune_trainer.publish.http import Body, HttpClient, HttpResponse
from finetune_trainer.publish.model_pack import MANIFEST_TYPE, build_artifact, digest_of
from finetune_trainer.publish.registry import Registry
from finetune_trainer.publish.resumable import BLOCK_BYTES, ProvenReader, UploadJournal, upload_all
from finetune_trainer.release.files import Release, ReleaseFile

log = logging.getLogger(__name__)
T = TypeVar("T")
CHUNK_BYTES = 16 * 1024**2
"""Number of bytes in one request. They are held in memory, and proxies in front of registries accept this many."""
BLOBS_AT_ONCE = 4
_GONE = frozenset({400, 404, 410, 416})
"""Statuses with which registries reject an upload that they do not know, or that continues at the wrong byte."""
_RANGE = re.compile(r"(?:bytes=)?0-(\d+)")
_ANY_MANIFEST = (
    f"{MANIFEST_TYPE}, application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.v2+json, "
    "application/vnd.docker.distribution.manifest.list.v2+json"
)


class _UploadGoneError(Exception):
    """The registry cannot continue this upload."""


class RegistryDestination:
    """One tag of one repository."""

    def __init__(
        self,
        place: RegistryPath,
        login: RegistryLogin | None,
        journal: UploadJournal,
        stop: threading.Event,
        *,
        plain_http: bool,
        patience: RetryPolicy | None = None,
    ) -> None:
        self._place, self._journal, self._stop = place, journal, stop
        self._patience = patience or RetryPolicy()
        self._wire = HttpClient(stop)
        self._registry = Registry(self._wire, place, login, plain_http=plain_http)
        self._address = f"oci://{place.registry}/{place.repository}"

    def publish(self, release: Release) -> Publication:
        """Publish as `Destination.publish` describes."""
        try:
            return self._publish(release)
        finally:
            self._wire.close()

    def _publish(self, release: Release) -> Publication:
        artifact = build_artifact(release)
        if not self._is_tagged(artifact.digest):
            blobs = {file.sha256: file for file in (*release.files, release.manifest)}
            # After a failure, the next attempt continues the other uploads from the journal.
            upload_all(self._upload_blob, list(blobs.values()), BLOBS_AT_ONCE, self._stop)
            config_digest = digest_of(artifact.config)
            if not self._has(config_digest):
                parts = (lambda: iter((artifact.config,)), len(artifact.config))
                self._with_retries(f"writing blob {config_digest}", lambda: self._put_whole(config_digest, parts))
            self._put_manifest(artifact.digest, artifact.manifest)
            # Another publication may have taken the tag meanwhile.
            if not self._is_tagged(artifact.digest):
                self._put_manifest(self._place.tag, artifact.manifest)
        self._journal.forget()
        return Publication(
            address=f"{self._address}:{self._place.tag}@{artifact.digest}",
            digest=artifact.digest,
            bytes_sent=self._wire.bytes_sent,
        )

    def _is_tagged(self, digest: str) -> bool:
        """Whether the tag names this content. Raises DestinationRefusedError if the tag names other content and must not move."""
        what, url = "looking at the tag", self._registry.url(f"manifests/{self._place.tag}")

        def look() -> str | None:
            answer = self._registry.send("HEAD", url, {"Accept": _ANY_MANIFEST}, what=what)
            if answer.status == NOT_FOUND:
                return None
            tagged = self._registry.check(answer, what).headers.get("Docker-Content-Digest")
            if tagged:
                return str(tagged)
            return digest_of(self._registry.request("GET", url, {"Accept": _ANY_MANIFEST}, what=what).content)

        tagged = self._with_retries(what, look)
        if tagged is None or tagged == digest:
            return tagged == digest
        if self._place.tag != DEFAULT_TAG:
            raise DestinationRefusedError(
                f"{DESTINATION_FIELD}: {self._address}:{self._place.tag} already names other content ({tagged})",
                f"name another tag, or delete this one; only `{DEFAULT_TAG}` moves from one result to the next",
            )
        log.info("%s:%s moves from %s to %s", self._address, self._place.tag, tagged, digest)
        return False

    def _put_manifest(self, reference: str, manifest: bytes) -> None:
        what, url = f"writing manifest {reference}", self._registry.url(f"manifests/{reference}")
        headers = {"Content-Type": MANIFEST_TYPE}
        self._with_retries(what, lambda: self._registry.request("PUT", url, headers, manifest, what=what))

    def _has(self, digest: str) -> bool:
        what = f"looking at blob {digest}"
        answer = self._with_retries(what, lambda: self._registry.send("HEAD", self._registry.url(f"blobs/{digest}"), what=what))
        return answer.status != NOT_FOUND and self._registry.check(answer, what).succeeded

    def _upload_blob(self, file: ReleaseFile) -> None:
        digest = f"sha256:{file.sha256}"
        failures = Retries(f"{self._address}: {file.name}", self._patience, self._stop, destination_unavailable)
        reached = 0

        def record(offset: int) -> None:
            """Count a request as progress only if the registry now has more bytes than ever before."""
            nonlocal reached
            if offset > reached:
                reached = offset
                failures.progressed()

        takes_chunks = True
        while not self._has(digest):
            is_new = self._journal.recall(digest) is None
            try:
                if takes_chunks and file.size:
                    self._upload_in_chunks(file, digest, record)
                else:
                    self._put_whole(digest, (lambda: _proven_parts(file), file.size))
                break
            except _UploadGoneError:
                takes_chunks = not is_new
                self._journal.remember(digest, "")
                failures.failed(TransientError("the registry does not continue the upload"))
            except TransientError as error:
                failures.failed(error)
        log.info("%s: %s is there, %d bytes", self._address, file.name, file.size)

    def _put_whole(self, digest: str, body: Body) -> None:
        what, headers = f"writing blob {digest}", {"Content-Type": "application/octet-stream"}
        location = self._registry.location(self._registry.request("POST", self._registry.url("blobs/uploads/"), what=what))
        self._registry.request("PUT", _with_digest(location, digest), headers, body, what=what)

    def _upload_in_chunks(self, file: ReleaseFile, digest: str, record: Callable[[int], None]) -> None:
        """Send the file in chunks. record: called with the number of bytes sent. Raises _UploadGoneError, TransientError."""
        what, headers = f"writing blob {digest}", {"Content-Type": "application/octet-stream"}
        location, offset, chunk_bytes = self._journal.recall(digest), 0, CHUNK_BYTES
        # Other pods may write to the journal, so its addresses are used only if they belong to the registry.
        if location is not None and self._registry.is_own(location):
            answer = self._registry.send("GET", location, what=what)
            if not answer.succeeded:
                raise _UploadGoneError
            offset = _received(answer, 0)
            location = self._registry.location(answer) if "Location" in answer.headers else location
        else:
            answer = self._registry.request("POST", self._registry.url("blobs/uploads/"), what=what)
            location = self._registry.location(answer)
            chunk_bytes = max(chunk_bytes, int(answer.headers.get("OCI-Chunk-Min-Length", "0")))
        if offset > file.size:
            raise _UploadGoneError
        with ProvenReader(file, self._stop) as reader:
            reader.seek(offset)
            while (start := reader.tell()) < file.size:
                chunk = reader.read(chunk_bytes)
                sent = start + len(chunk)
                position = {"Content-Range": f"{start}-{sent - 1}"}
                answer = self._registry.send("PATCH", location, headers | position, chunk, what=what)
                if answer.status in _GONE:
                    raise _UploadGoneError
                self._registry.check(answer, what)
                location = self._registry.location(answer)
                if _received(answer, sent) != sent:
                    raise _UploadGoneError
                self._journal.remember(digest, location)
                record(sent)
        answer = self._registry.send("PUT", _with_digest(location, digest), headers, b"", what=what)
        if answer.status in _GONE:
            raise _UploadGoneError
        self._registry.check(answer, what)

    def _with_retries(self, what: str, operation: Callable[[], T]) -> T:
        return with_retries(f"{self._address}: {what}", self._patience, self._stop, destination_unavailable, operation)


def _received(answer: HttpResponse, default: int) -> int:
    """Return the number of bytes that the registry has. The Range header names the last byte; 0-0 may also mean no bytes."""
    range_match = _RANGE.fullmatch(answer.headers.get("Range", ""))
    if range_match is None:
        return default
    return int(range_match[1]) + 1 if int(range_match[1]) else 0


def _with_digest(location: str, digest: str) -> str:
    """Return the upload's address with the digest appended. Nothing else changes, because the address may be signed."""
    return f"{location}{'&' if '?' in location else '?'}digest={digest.replace(':', '%3A')}"


def _proven_parts(file: ReleaseFile) -> Iterator[bytes]:
    with ProvenReader(file) as reader:
        while part := reader.read(BLOCK_BYTES):
            yield part
